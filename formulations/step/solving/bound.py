"""A bound on all plans from a relaxation, computed in parallel to the search for plans.

Where a formulation's problem leaves plans out, its bound proves nothing about those. The relaxation's bound holds for
all plans that cost at most as much as a known plan. So it can begin as soon as any plan is known, in a process of its
own, or some time later where other processes need the cores. With one process at a time it comes after the search.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial

from formulations.problem.solution import KnownBound, Progress, SolveOptions, SolveResult, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import SolverPool, solve
from formulations.step.solving.background import Background

BOUNDING = "price_bounding"
"""Solver of the relaxation; it searches no assignments, which would be none of the original problem."""

ALONE_SHARE = 0.4
"""Part of the time limit that the bound has where it comes after the search."""

_LEAST_SECONDS, _LEAST_PATIENCE = 0.05, 3.0
_POLL_SECONDS = 0.05
_OVERTIME_SECONDS = 1.0
"""Time for the last proof, which may begin right before the limit."""


class BoundBeside(Background):
    """One bound; use it in a ``with`` block, which ends what still runs.

    Parameters
    ----------
    relaxed
        From a plan's cost to a problem whose bounds hold for all plans that cost at most that; None where there is
        nothing to do.
    options
        The time limit is that of search and bound together, from now on.
    pool
        Warm workers, or None.
    after
        Part of the time limit after which it may begin, where other processes run before.
    least_seconds
        Time below which a bound is not to be expected: with less left it does not begin.
    """

    def __init__(
        self,
        relaxed: Callable[[int], StrategyProblem] | None,
        options: SolveOptions,
        pool: SolverPool | None,
        after: float = 0.0,
        least_seconds: float = 0.0,
    ) -> None:
        super().__init__()
        self._relaxed, self._options, self._pool = relaxed, options, pool
        self._begun = time.monotonic()
        self._earliest = self._begun + after * options.time_limit
        self._deadline = self._begun + options.time_limit
        self._least_seconds = least_seconds
        self._found: Future[SolveResult | None] | None = None
        self._known: int | None = None
        self.interrupted = False
        """Whether Ctrl-C ended the wait for a better bound."""
        self._above = 0
        """Lower bound on the cost of plans that the relaxation leaves out."""

    @property
    def search_seconds(self) -> float:
        """Time limit of the search: the whole limit, unless the bound comes after it."""
        share = ALONE_SHARE if self._relaxed is not None and self._options.workers == 1 else 0.0
        if share * self._options.time_limit < self._least_seconds:
            share = 0.0
        return (1.0 - share) * self._options.time_limit

    def begin(self, cost: int) -> None:
        """Begin, once, with plans of this cost or less; does nothing if only one process may run.

        The cost is that of a known plan, or of one that may not fit: then the bound is at most one above it.
        """
        if self._options.workers != 1:
            self._begin(cost)

    def bound(self, cost: int, patient: bool = True) -> KnownBound | None:
        """A bound on all plans, at most the cost of the best one, and how it is known.

        Parameters
        ----------
        cost
            Of the best plan.
        patient
            Whether to wait for a better bound: as long as the search has taken, until the time is over, until it equals
            the cost, or until Ctrl-C.

        Returns
        -------
        KnownBound or None
            None where nothing was proved.
        """
        if patient:
            self.go.set()
            self._begin(cost)
            try:
                self._wait(cost)
            except KeyboardInterrupt:  # the plan is returned all the same
                self.interrupted = True
        self.end()
        result = None if self._found is None else self._found.result()
        if result is None or result.proof is None:
            return None
        if result.status is Status.INFEASIBLE:
            return KnownBound(min(self._above, cost), result.proof, result.proved_by or result.solver)
        known = result.known_bound
        return None if known is None else replace(known, value=min(known.value, self._above, cost))

    def _wait(self, cost: int) -> None:
        """Wait for the end, while a better bound is possible."""
        now = time.monotonic()
        ends = min(self._deadline, now + max(_LEAST_PATIENCE, now - self._begun)) + _OVERTIME_SECONDS
        while self._found is not None and not self._found.done() and time.monotonic() < ends:
            if self._known is not None and self._known >= min(self._above, cost):
                return
            wait([self._found], _POLL_SECONDS)

    def _begin(self, cost: int) -> None:
        if self._relaxed is not None and self._found is None:
            self._above = cost + 1
            self._found = self.submit(partial(self._work, self._relaxed, cost))

    def _work(self, relaxed: Callable[[int], StrategyProblem], cost: int) -> SolveResult | None:
        self.go.wait(self._earliest - time.monotonic())
        if self.stop.is_set() or self._deadline - time.monotonic() < self._least_seconds:
            return None
        problem = relaxed(cost)
        seconds = max(_LEAST_SECONDS, self._deadline - time.monotonic())
        options = replace(self._options, time_limit=seconds, initial_choices=None)
        return solve(problem, BOUNDING, options, self._report, self._pool, self.stop.is_set)

    def _report(self, progress: Progress) -> None:
        self._known = progress.bound
