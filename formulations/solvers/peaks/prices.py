"""Whether anything fits, costs set aside: an assignment within the limits, or a proof by memory prices.

1. Without costs presolve removes much more, often everything.
2. A local search on violations (:mod:`formulations.solvers.local_search.feasibility`) looks for an assignment that
   fits.
3. Every limit becomes a decision from its value upwards (:mod:`formulations.solvers.peaks.limit_problem`), so that the
   optimum is by how much the limits are too low in all, and :mod:`formulations.solvers.prices.lagrangian` searches: an
   assignment of cost zero fits; a bound above zero, evaluated in exact integers, proves that nothing does.

There may be a gap between the two, and then nothing is said.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from formulations.presolve import lean_presolve
from formulations.presolve.workspace.tunables import PRESOLVE_SHARE
from formulations.problem.checker import check
from formulations.problem.compiled import seed_compiled
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import IntArray, StrategyProblem
from formulations.solvers.local_search.feasibility import find_feasible
from formulations.solvers.local_search.incumbent_search import exact_objective
from formulations.solvers.local_search.tunables import MOVES_AT_ONCE
from formulations.solvers.peaks.limit_problem import peak_problem, peak_range
from formulations.solvers.peaks.tunables import (
    FEASIBILITY_LOCAL_SHARE,
    FEASIBILITY_PRICE_STEPS,
    FEASIBILITY_STEPS_PER_NODE,
)
from formulations.solvers.prices import lagrangian
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Find any feasible assignment, or prove that there is none; costs play no part and no bound is claimed."""
    started = time.monotonic()
    free = lean_presolve(peak_problem(problem, {}).problem, started + PRESOLVE_SHARE * options.time_limit)
    if free.contradiction:
        return Claim(None, None, proved_infeasible=True, message=free.contradiction, certified=True)
    seed_compiled(options.seed)
    claim = _search(free.problem, started + FEASIBILITY_LOCAL_SHARE * options.time_limit)
    if claim.choices is None and not claim.proved_infeasible:
        claim = _decide(free.problem, replace(options, initial_choices=None), started)
    if claim.choices is None:
        return claim
    choices = free.lift(claim.choices)
    incumbent(choices)
    report(Progress(time.monotonic() - started, None, None, "peak_prices"))
    return Claim(choices, None, iterations=claim.iterations)


def _search(problem: StrategyProblem, deadline: float) -> Claim:
    """Search locally for an assignment that fits; what is found is checked in exact integers."""
    flat = flatten_or_finish(problem, lambda _: None)
    if isinstance(flat, Claim):
        return flat
    choices: IntArray = np.zeros(len(problem.nodes), dtype=np.int64)
    weights = np.ones(len(flat.usage.limit)), np.ones(len(flat.graph.arity))
    costs = flat.unary, flat.tables, flat.penalty
    for done in range(0, FEASIBILITY_STEPS_PER_NODE * len(choices) + MOVES_AT_ONCE, MOVES_AT_ONCE):
        if find_feasible(flat.graph, flat.usage, *costs, choices, *weights, MOVES_AT_ONCE):
            original = flat.original_choices(choices)
            return Claim(original if check(problem, original).ok else None, None, iterations=done)
        if time.monotonic() > deadline:
            break
    return Claim(None, None)


def _decide(problem: StrategyProblem, options: SolveOptions, started: float) -> Claim:
    """Search for the smallest lack, from both sides, until it is known to be zero or not to be."""
    limits = {r: resource.limit for r, resource in enumerate(problem.resources) if resource.limit is not None}
    lacking = peak_problem(problem, {r: (limit, peak_range(problem, r)[1]) for r, limit in limits.items()})
    reduced = lean_presolve(lacking.problem, started + FEASIBILITY_LOCAL_SHARE * options.time_limit)
    if reduced.contradiction:
        return Claim(None, None, proved_infeasible=True, message=reduced.contradiction, certified=True)
    remaining = max(0.0, started + options.time_limit - time.monotonic())
    verdict = _Verdict(reduced.problem, reduced.offset)
    try:
        steps = FEASIBILITY_PRICE_STEPS if options.iteration_limit is None else options.iteration_limit
        options = replace(options, time_limit=remaining, iteration_limit=steps)
        claim = lagrangian.solve(reduced.problem, options, verdict.report, verdict.take)
    except _Decided:
        claim = Claim(verdict.fitting, verdict.lacking)
    if claim.proved_infeasible:
        return claim
    verdict.judge(claim.choices, claim.bound)
    if verdict.lacking is not None:
        message = f"by memory prices the limits lack at least {verdict.lacking} in all"
        iterations = claim.iterations
        return Claim(None, None, proved_infeasible=True, message=message, iterations=iterations, certified=True)
    if verdict.fitting is None:
        return Claim(None, None, message="memory prices decide nothing", iterations=claim.iterations)
    choices = lacking.original_choices(reduced.lift(verdict.fitting))
    return Claim(choices, None, iterations=claim.iterations)


class _Decided(Exception):
    """Raised to end the search: the question is decided."""


@dataclass(slots=True, eq=False)
class _Verdict:
    """What a search for the smallest lack has shown so far; ends it as soon as that is enough.

    ``fitting`` lacks nothing, or is None; ``lacking`` is a proven bound above zero, or None.
    """

    problem: StrategyProblem
    offset: int
    fitting: tuple[int, ...] | None = None
    lacking: int | None = None
    newest: tuple[int, ...] | None = None

    def take(self, choices: tuple[int, ...]) -> None:
        """Remember the newest assignment, whose cost :meth:`report` receives."""
        self.newest = choices

    def report(self, progress: Progress) -> None:
        """Judge by the newest incumbent and bound; raise where they decide."""
        lacks_nothing = progress.incumbent is not None and progress.incumbent + self.offset == 0
        self.judge(self.newest if lacks_nothing else None, progress.bound)
        if self.fitting is not None or self.lacking is not None:
            raise _Decided

    def judge(self, choices: tuple[int, ...] | None, bound: int | None) -> None:
        """Take over what decides."""
        if bound is not None and bound + self.offset > 0:
            self.lacking = bound + self.offset
        if choices is not None and exact_objective(self.problem, choices) + self.offset == 0:
            self.fitting = choices
