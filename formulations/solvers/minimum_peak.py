r"""The smallest limit of one resource that any assignment fits into.

.. math:: \min\; P \quad\text{s.t.}\quad \sum_c usage_{c,t} z_c \le P \ \ \forall t

over the columns of :mod:`formulations.linear_model`; costs do not matter, the limits of the other
resources hold. Rows are added as replays show where the peak is. On problems too large for that, the bound is
that of the last relaxation that was solved and the incumbent is a heuristic's; ``proved`` says so.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from formulations.checker import ViolationKind, check, tensors_alive
from formulations.linear_model import build_linear_model
from formulations.problem import IntArray, ProblemError, StrategyProblem, UsageTerm
from formulations.solution import Claim, Progress, SolveOptions
from formulations.solvers.base import ReportIncumbent, ReportProgress
from formulations.solvers.highs_session import HighsSession, Outcome, margin
from formulations.solvers.lazy_rows import LazyRows
from formulations.solvers.registry import SolverSpec
from formulations.solvers.worker import Ending, Listener, SolverPool

_SCALED_BITS = 20
_AREA_BITS = 45
_HEURISTIC_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class MinimumPeak:
    """The smallest peak found, and below what no assignment can get.

    Parameters
    ----------
    resource
        Name of the resource.
    peak
        Smallest peak found, the smallest limit known to fit; None if no assignment was found.
    bound
        No assignment peaks below this; None if nothing is known.
    proved
        Whether ``peak`` equals ``bound``.
    infeasible
        HiGHS says that no assignment exists whatever the limit of this resource.
    choices
        The assignment behind ``peak``.
    time, time_name
        When it peaks.
    alive
        What is alive then: names of the nodes of a table and its amount, the largest first.
    message
        How the search ended.
    """

    resource: str
    peak: int | None
    bound: int | None
    proved: bool
    infeasible: bool
    choices: tuple[int, ...] | None
    time: int | None
    time_name: str
    alive: tuple[tuple[tuple[str, ...], int], ...]
    message: str


def minimum_peak(
    problem: StrategyProblem, resource: int = 0, options: SolveOptions | None = None, pool: SolverPool | None = None
) -> MinimumPeak:
    """Minimise the peak of one resource in a worker process.

    Parameters
    ----------
    problem
        A problem; the limit of ``resource`` in it is ignored.
    resource
        Index of the resource.
    options, pool
        As for :func:`formulations.solvers.solve`.

    Raises
    ------
    ProblemError
        If the resource does not exist or the problem is not well formed.
    """
    problem.validate()
    if not 0 <= resource < len(problem.resources):
        raise ProblemError(f"resource {resource} does not exist; problem {problem.name} has {len(problem.resources)}")
    unlimited = without_limit(problem, resource)
    best: list[tuple[int, tuple[int, ...]]] = []
    bounds: list[int] = []

    def keep(found: list[tuple[int, ...]]) -> None:
        for choices in found:
            report = check(unlimited, choices)
            if report.ok and (not best or report.peaks[resource].usage < best[0][0]):
                best[:] = [(report.peaks[resource].usage, choices)]

    def hear(progress: Progress) -> None:
        if progress.bound is not None:
            bounds.append(progress.bound)

    spec = SolverSpec("minimum_peak", f"{__name__}:solve_peak", {"resource": resource})
    workers = pool if pool is not None else SolverPool()
    try:
        outcome = workers.run(spec, unlimited, options or SolveOptions(), Listener(hear, keep))
    finally:
        if pool is None:
            workers.close()
    claim = outcome.claim
    if claim is not None and claim.choices is not None:
        keep([claim.choices])
    if claim is not None and claim.bound is not None:
        bounds.append(claim.bound)
    bound = max(bounds, default=None)
    infeasible = claim is not None and claim.proved_infeasible and not best
    message = outcome.message if outcome.ending is Ending.FINISHED else f"{outcome.ending}: {outcome.message}"
    name = problem.resources[resource].name
    if not best:
        return MinimumPeak(name, None, bound, False, infeasible, None, None, "", (), message)
    peak, choices = best[0]
    when = check(unlimited, choices).peaks[resource].time
    alive = tensors_alive(unlimited, choices, resource, when) if peak else []
    named = tuple((tuple(problem.nodes[i].name for i in scope), amount) for scope, amount in alive)
    time_name = problem.time_names[when] if when < len(problem.time_names) else ""
    return MinimumPeak(name, peak, bound, bound == peak, False, choices, when, time_name, named, message)


def without_limit(problem: StrategyProblem, resource: int) -> StrategyProblem:
    """Return the problem without the limit of one resource."""
    resources = list(problem.resources)
    resources[resource] = replace(resources[resource], limit=None)
    return replace(problem, resources=tuple(resources))


def solve_peak(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent, resource: int
) -> Claim:
    """Minimise the peak of ``resource``; ``bound`` and the incumbent of the progress are peaks."""
    return _PeakSearch(problem, options, report, incumbent, resource).run()


def area_problem(problem: StrategyProblem, resource: int) -> StrategyProblem:
    """Return the problem with amount times duration as its cost: a proxy that any heuristic can minimise."""
    terms = [t for _, t in problem.usage_terms() if t.resource == resource and t.start < t.end]
    largest = sum((t.end - t.start) * int(t.amount.max()) for t in terms)
    shift = max(0, largest.bit_length() - _AREA_BITS)

    def area(shape: tuple[int, ...], usage: tuple[UsageTerm, ...]) -> IntArray:
        total = np.zeros(shape, dtype=np.int64)
        for term in usage:
            if term.resource == resource and term.start < term.end:
                total += ((term.amount.astype(object) * (term.end - term.start)) >> shift).astype(np.int64)
        return total

    nodes = tuple(replace(n, cost=area(n.cost.shape, n.usage)) for n in problem.nodes)
    factors = tuple(replace(f, cost=area(f.cost.shape, f.usage)) for f in problem.factors)
    return replace(problem, nodes=nodes, factors=factors)


class _PeakSearch:
    """State of one search."""

    def __init__(
        self,
        problem: StrategyProblem,
        options: SolveOptions,
        report: ReportProgress,
        incumbent: ReportIncumbent,
        resource: int,
    ) -> None:
        self.started = time.monotonic()
        self.deadline = self.started + options.time_limit
        self.problem, self.options, self.resource = problem, options, resource
        self.report, self.incumbent = report, incumbent
        self.best: tuple[int, tuple[int, ...]] | None = None
        self.rounds = 0
        self.model = build_linear_model(problem, peak_resource=resource)
        self.table = next(table for table in self.model.usage if table.resource == resource)
        self.bound = max((int(u) for u in self.table.least_profile()), default=0)

    def run(self) -> Claim:
        self.tell()
        self.try_heuristic()
        largest = max(1, self.best[0] if self.best else sum(int(a) for a in self.table.amount))
        unit = 2.0 ** max(0, largest.bit_length() - _SCALED_BITS)
        session = HighsSession(self.model, np.zeros(self.model.columns), self.options.seed, peak_unit=unit)
        rows = LazyRows(session)
        rows.add_all_if_few()
        groups = len(self.model.group_start) - 1
        error = margin(np.array([float(1 << _SCALED_BITS)]), groups)
        integer = False
        while time.monotonic() < self.deadline and not self.proved():
            outcome = session.run(self.deadline)
            self.rounds += 1
            if outcome.infeasible:
                return Claim(None, None, proved_infeasible=self.best is None, message=outcome.message)
            if math.isfinite(outcome.bound):
                self.raise_bound(outcome.bound - error, unit)
            if outcome.values is None:
                break
            choices = self.model.choices(outcome.values)
            self.offer(choices)
            if self.add_rows(rows, outcome, choices, unit, integer) and outcome.finished:
                continue
            if integer or not outcome.finished:
                break
            integer = True
            session.make_integer(absolute_gap=0.9 / unit if unit > 1 else 0.9)
            session.listen(
                lambda values: self.offer(self.model.choices(values)),
                lambda bound: self.raise_bound(bound - error, unit),
            )
        return Claim(
            self.best[1] if self.best else None,
            self.bound,
            message="proved" if self.proved() else "not proved within the limits",
            iterations=self.rounds,
        )

    def add_rows(self, rows: LazyRows, outcome: Outcome, choices: tuple[int, ...], unit: float, integer: bool) -> bool:
        """Add rows that the solution exceeds; True if any was added."""
        if outcome.values is None:
            return False
        peak = float(outcome.values[self.model.columns]) * unit
        if not integer:
            limits = [peak if t is self.table else _as_float(t.limit) for t in self.model.usage]
            return rows.add_violated(outcome.values[: self.model.columns], limits) > 0
        local = self.model.local_choice(choices)
        if local is None:
            return False
        return rows.add_for_choice(local) or rows.add_peak_rows(self.table, local, peak) > 0

    def try_heuristic(self) -> None:
        """Take a heuristic's assignment of least area as a first incumbent."""
        from formulations.solvers import greedy

        options = replace(self.options, time_limit=_HEURISTIC_SHARE * self.options.time_limit, initial_choices=None)
        claim = greedy.solve(area_problem(self.problem, self.resource), options, lambda _: None, lambda _: None)
        if claim.choices is not None:
            self.offer(claim.choices)

    def offer(self, choices: tuple[int, ...]) -> None:
        report = check(self.problem, choices)
        if any(v.kind is not ViolationKind.OVER_LIMIT or v.resource != self.resource for v in report.violations):
            return
        peak = report.peaks[self.resource].usage
        if self.best is None or peak < self.best[0]:
            self.best = (peak, choices)
            self.incumbent(choices)
            self.tell()

    def raise_bound(self, scaled: float, unit: float) -> None:
        bound = math.ceil(Fraction(scaled) * Fraction(unit))
        if bound > self.bound:
            self.bound = bound
            self.tell()

    def proved(self) -> bool:
        return self.best is not None and self.best[0] == self.bound

    def tell(self) -> None:
        peak = self.best[0] if self.best else None
        self.report(Progress(time.monotonic() - self.started, peak, self.bound, "minimum_peak"))


def _as_float(limit: int | None) -> float | None:
    return None if limit is None else float(limit)
