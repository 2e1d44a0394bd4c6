"""The smallest limit of one resource that any assignment fits into: found, and bounded from below.

The limit becomes a decision (:mod:`formulations.solvers.peaks.limit_problem`), and presolve removes what cannot matter
for any limit in question. A small rest goes to CP-SAT, a large one to memory prices: both bound in exact integers,
where the tolerances of branch and cut in floating point would count as bytes. Where a first part of the time does not
suffice, a local search (:mod:`formulations.solvers.peaks.falling_limit`) lowers the peak, the moments at which the best
assignment peaks say what is needed at least (:mod:`formulations.solvers.peaks.moments`), and they go on above the bound
that is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from formulations.encodings.linear_model import linear_columns
from formulations.presolve import lean_presolve
from formulations.presolve.workspace.tunables import PRESOLVE_SHARE
from formulations.problem.checker import check, tensors_alive
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status
from formulations.problem.strategy_problem import ProblemError, StrategyProblem
from formulations.solvers.peaks.limit_problem import peak_problem, peak_range
from formulations.solvers.peaks.moments import busiest_moments, moment_problem
from formulations.solvers.peaks.tunables import (
    MOST_COLUMNS,
    PEAK_FIRST_SHARE,
    PEAK_LEAST_SECONDS,
    PEAK_MOMENTS_SHARE,
    PEAK_SEARCH_SHARE,
)
from formulations.solvers.processes.worker import Ending, Listener, SolverPool
from formulations.solvers.protocol.registry import SolverSpec
from formulations.solvers.running.run import solve


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
        No assignment peaks below this.
    proved
        Whether ``peak`` equals ``bound``.
    infeasible
        No assignment exists whatever the limit of this resource.
    choices
        The assignment behind ``peak``; the checker has replayed it.
    time, time_name
        When it peaks.
    alive
        What is alive then: names of the nodes of a table and its amount, the largest first.
    seconds
        Wall time.
    solver
        Who worked last.
    message
        How the search ended.
    """

    resource: str
    peak: int | None
    bound: int
    proved: bool
    infeasible: bool
    choices: tuple[int, ...] | None
    time: int | None
    time_name: str
    alive: tuple[tuple[tuple[str, ...], int], ...]
    seconds: float
    solver: str
    message: str


def minimum_peak(
    problem: StrategyProblem,
    resource: int = 0,
    options: SolveOptions | None = None,
    pool: SolverPool | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> MinimumPeak:
    """Minimise the peak of one resource; costs do not matter, and the limits of other resources hold.

    Parameters
    ----------
    problem
        A problem; the limit of ``resource`` in it is ignored.
    resource
        Index of the resource.
    options, pool
        As for :func:`formulations.solvers.solve`.
    progress
        Called in this thread when the smallest peak or its bound improves; both are amounts of the resource.

    Raises
    ------
    ProblemError
        If the resource does not exist or the problem is not well formed.
    """
    problem.validate()
    if not 0 <= resource < len(problem.resources):
        raise ProblemError(f"resource {resource} does not exist; problem {problem.name} has {len(problem.resources)}")
    workers = pool if pool is not None else SolverPool()
    try:
        search = _PeakSearch(problem, resource, options or SolveOptions(), workers, progress)
        return search.run()
    finally:
        if pool is None:
            workers.close()


def without_limit(problem: StrategyProblem, resource: int) -> StrategyProblem:
    """Return the problem without the limit of one resource."""
    resources = list(problem.resources)
    resources[resource] = replace(resources[resource], limit=None)
    return replace(problem, resources=tuple(resources))


def _without_costs(problem: StrategyProblem) -> StrategyProblem:
    nodes = tuple(replace(node, cost=np.zeros_like(node.cost)) for node in problem.nodes)
    factors = tuple(replace(factor, cost=np.zeros_like(factor.cost)) for factor in problem.factors)
    return replace(problem, nodes=nodes, factors=factors)


class _PeakSearch:
    """The best assignment and bound so far."""

    def __init__(
        self,
        problem: StrategyProblem,
        resource: int,
        options: SolveOptions,
        workers: SolverPool,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.problem = without_limit(problem, resource)
        self.resource, self.options, self.workers = resource, options, workers
        self.progress = progress
        self.solver = "presolve"
        self.started = time.monotonic()
        self.bound, self.high = peak_range(problem, resource)
        self.peak: int | None = None
        self.choices: tuple[int, ...] | None = None
        self.infeasible = self.interrupted = False
        self.message = ""

    def run(self) -> MinimumPeak:
        """Look first, then again in the range that is left."""
        if self.options.initial_choices is not None:
            self._take(self.options.initial_choices)
        parts = (
            (PEAK_FIRST_SHARE, self._look),
            (PEAK_SEARCH_SHARE, self._search),
            (PEAK_MOMENTS_SHARE, self._raise_by_moments),
            (1.0, self._look),
        )
        for share, work in parts:
            remaining = share * self.options.time_limit - (time.monotonic() - self.started)
            if remaining > 0 and not (self.infeasible or self.interrupted) and self.peak != self.bound:
                work(remaining)
                self._report()
        return self._result()

    def _look(self, seconds: float) -> None:
        """Solve for the limit, from the bound upwards."""
        begin = time.monotonic()
        limit = peak_problem(self.problem, {self.resource: (self.bound, self.high)})
        reduced = lean_presolve(limit.problem, time.monotonic() + PRESOLVE_SHARE * seconds)
        if reduced.contradiction:
            self.infeasible, self.message = self.peak is None, reduced.contradiction
            return
        self.solver = "cpsat" if linear_columns(reduced.problem) <= MOST_COLUMNS else "lagrangian"
        remaining = seconds - (time.monotonic() - begin)
        options = replace(self.options, time_limit=max(PEAK_LEAST_SECONDS, remaining), relative_gap=0.0)
        start = None
        if self.choices is not None and self.peak is not None:
            start = reduced.lift.project(limit.with_limits(self.choices, {self.resource: self.peak}))
        result = self._solved(reduced.problem, self.solver, replace(options, initial_choices=start))
        self.message = result.message
        self.infeasible = result.status is Status.INFEASIBLE
        if result.choices is not None:
            self._take(limit.original_choices(reduced.lift(result.choices)))
        if result.bound is not None:
            self.bound += max(0, result.bound + reduced.offset)
        if result.claimed is not None and self.peak is not None and self.bound < self.peak:
            self._refute(seconds - (time.monotonic() - begin))

    def _refute(self, seconds: float) -> None:
        """Prove that nothing fits into less than the best peak, or find what does; a claim of CP-SAT is no proof."""
        assert self.peak is not None
        if self.interrupted or seconds < PEAK_LEAST_SECONDS:
            return
        resources = list(self.problem.resources)
        resources[self.resource] = replace(resources[self.resource], limit=self.peak - 1)
        options = replace(self.options, time_limit=seconds, relative_gap=0.0, initial_choices=None)
        tighter = _without_costs(replace(self.problem, resources=tuple(resources)))
        result = self._solved(tighter, "branch_and_bound", options)
        if result.status is Status.INFEASIBLE:
            self.bound = self.peak
        if result.choices is not None:
            self._take(result.choices)

    def _search(self, seconds: float) -> None:
        """Lower the peak by local search from the best assignment."""
        spec = SolverSpec(
            "falling_limit", "formulations.solvers.peaks.falling_limit:solve", {"resource": self.resource}
        )
        resources = list(self.problem.resources)
        resources[self.resource] = replace(resources[self.resource], limit=self.bound)
        problem = replace(self.problem, resources=tuple(resources))
        options = replace(self.options, time_limit=seconds, initial_choices=self.choices)
        outcome = self.workers.run(spec, problem, options, Listener(lambda _: None, self._take_last))
        self.interrupted |= outcome.ending is Ending.INTERRUPTED
        if outcome.claim is not None and outcome.claim.choices is not None:
            self._take(outcome.claim.choices)

    def _raise_by_moments(self, seconds: float) -> None:
        """Ask what is needed at least at the moments that are busiest in the best assignment, one after another."""
        deadline, best = time.monotonic() + seconds, self.choices
        for usage, moment in busiest_moments(self.problem, self.resource, best):
            remaining = deadline - time.monotonic()
            if self.interrupted or remaining < PEAK_LEAST_SECONDS or (best is not None and usage <= self.bound):
                return
            alone = lean_presolve(moment_problem(self.problem, self.resource, moment), time.monotonic() + remaining / 2)
            if alone.contradiction:
                self.infeasible, self.message = self.peak is None, alone.contradiction
                return
            options = replace(self.options, time_limit=remaining, relative_gap=0.0, initial_choices=None)
            result = self._solved(alone.problem, "lagrangian", options)
            if result.choices is not None:
                self._take(alone.lift(result.choices))
            if result.bound is not None:
                self.bound = max(self.bound, result.bound + alone.offset)
            self._report()

    def _solved(self, problem: StrategyProblem, solver: str, options: SolveOptions) -> SolveResult:
        """Solve a problem; after Ctrl-C nothing else is begun."""
        result = solve(problem, solver, options, pool=self.workers)
        self.interrupted |= Ending.INTERRUPTED in result.message
        return result

    def _take_last(self, found: list[tuple[int, ...]]) -> None:
        self._take(found[-1])

    def _take(self, choices: tuple[int, ...]) -> None:
        report = check(self.problem, choices)
        if report.ok and (self.peak is None or report.peaks[self.resource].usage < self.peak):
            self.peak, self.choices = report.peaks[self.resource].usage, choices
            self._report()

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(Progress(time.monotonic() - self.started, self.peak, self.bound, self.solver))

    def _result(self) -> MinimumPeak:
        when, time_name = None, ""
        alive: tuple[tuple[tuple[str, ...], int], ...] = ()
        if self.choices is not None:
            when = check(self.problem, self.choices).peaks[self.resource].time
            names = self.problem.time_names
            time_name = names[when] if when < len(names) else ""
            tables = tensors_alive(self.problem, self.choices, self.resource, when) if self.peak else []
            alive = tuple((tuple(self.problem.nodes[i].name for i in scope), amount) for scope, amount in tables)
        return MinimumPeak(
            self.problem.resources[self.resource].name,
            self.peak,
            self.bound,
            self.peak == self.bound,
            self.infeasible,
            self.choices,
            when,
            time_name,
            alive,
            time.monotonic() - self.started,
            self.solver,
            self.message,
        )
