"""A second bound on the cost of a solved step, by a method of another kind than that of its first.

Dynamic programming is set beside prices and linear programs, and prices beside dynamic programming. The second method
takes the problem as it is, without presolve and without what the first one found. A bound above the plan's cost would
contradict the plan; one near it confirms the plan twice.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, wait
from dataclasses import replace

from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status, relative_gap
from formulations.solvers import SolverPool, solve
from formulations.solvers.protocol.registry import method_of
from formulations.step.solving.background import Background
from formulations.step.solving.solved import SolvedStep

DYNAMIC_PROGRAM, PRICES = "bucket_bound", "price_bounding"
"""Solvers that only bound."""

LONGEST_SECONDS = 5.0
"""Longest time of the second method."""

NEAR_ENOUGH = 0.01
"""Gap at which the second method stops."""

_OVERTIME_SECONDS = 5.0
"""Time for building the problem and for the last proof."""


class SecondBound(Background):
    """One bound, computed in parallel; use it in a ``with`` block.

    Parameters
    ----------
    solved
        The decision with its first bound.
    time_limit
        Seconds; :data:`LONGEST_SECONDS` at most.
    seed
        Of the solver.
    pool
        Warm workers, or None.
    """

    def __init__(self, solved: SolvedStep, time_limit: float, seed: int, pool: SolverPool | None) -> None:
        super().__init__()
        is_same = method_of(solved.result.proved_by) == method_of(DYNAMIC_PROGRAM)
        self._solved, self._solver, self._pool = solved, PRICES if is_same else DYNAMIC_PROGRAM, pool
        self._options = SolveOptions(time_limit=min(LONGEST_SECONDS, time_limit), seed=seed)
        self._best: int | None = None
        self._found: Future[SolveResult] = self.submit(self._work)

    def result(self) -> SolveResult:
        """Wait for the bound; Ctrl-C ends the wait, and what is proved by then counts."""
        with contextlib.suppress(KeyboardInterrupt):
            wait([self._found], self._options.time_limit + _OVERTIME_SECONDS)
        self.end()
        return self._found.result()

    def _work(self) -> SolveResult:
        problem = self._solved.bounding_problem()
        return solve(problem, self._solver, self._options, self._report, self._pool, self._should_stop)

    def _report(self, progress: Progress) -> None:
        self._best = progress.bound

    def _should_stop(self) -> bool:
        gap = relative_gap(self._solved.result.objective, self._best)
        return self.stop.is_set() or (gap is not None and gap <= NEAR_ENOUGH)


def ranked(first: SolveResult, second: SolveResult) -> tuple[SolveResult, SolveResult]:
    """Return the result with the higher of two bounds, and the one whose bound is the other.

    A second bound above the cost stays where it is, and contradicts the plan.
    """
    cost, bound = first.objective, second.bound
    if cost is None or bound is None or bound > cost or (first.bound is not None and first.bound >= bound):
        return first, second
    status = Status.OPTIMAL if bound == cost else first.status
    is_beyond = first.claimed is not None and first.claimed > bound
    better = replace(
        first,
        status=status,
        bound=bound,
        gap=relative_gap(cost, bound),
        proof=second.proof,
        proved_by=second.proved_by,
        claimed=first.claimed if is_beyond else None,
        claimed_by=first.claimed_by if is_beyond else "",
    )
    return better, replace(first, solver=first.proved_by or first.solver)
