"""Decisions to begin from: those of smaller problems, each of which takes little time.

- the decision without a limit: where it fits, nothing is better;
- recomputation for the layouts of that decision (with every layout fixed little is left to decide);
- decisions of the problems that this one contains (:attr:`StepProblem.starts`), the largest last, each from the best
  so far;
- recomputation for the layouts of the best so far, and layouts for its reruns, in turn as long as one of them helps.

All are decisions of the problem itself, so a solve that begins from them is no worse than any of them, however little
time it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from formulations.models.holds import shortest_holds
from formulations.models.registry import StepProblem
from formulations.models.sharding import MEMORY
from formulations.models.step import StepDecision
from formulations.solution import SolveOptions, Status
from formulations.solvers import SolverPool, solve
from formulations.solvers.minimum_peak import without_limit

_LEAST_SECONDS = 0.02
_SMALL, _MEDIUM, _LARGE = 1 / 16, 1 / 4, 1 / 2
"""Part of the time that is left for one of many problems, for it where nothing is known yet, and for the largest."""


@dataclass(frozen=True, slots=True)
class Executed:
    """What a decision costs (quanta) and holds at most (bytes) when it is executed."""

    cost: int
    peak: int


@dataclass(frozen=True, slots=True)
class Start:
    """A decision within the limit, executed."""

    decision: StepDecision
    executed: Executed


def begin(
    built: StepProblem,
    execute: Callable[[StepDecision], Executed],
    solver: str,
    options: SolveOptions,
    pool: SolverPool | None = None,
) -> Start | None:
    """Find a decision to begin from.

    Parameters
    ----------
    built
        The problem under the limit.
    execute
        Executes a decision.
    solver, options
        How to solve the smaller problems; the time limit is that of all of them together.
    pool
        Warm workers, or None.

    Returns
    -------
    Start or None
        The cheapest decision found that is within the limit when it is executed, if any.
    """
    return _Beginning(built, execute, solver, options, pool).run()


def encoded(built: StepProblem, decision: StepDecision) -> tuple[int, ...]:
    """Choices of a problem that mean a decision, every value held no longer than its readers need.

    Raises
    ------
    ValueError
        If the problem leaves the decision out.
    """
    return shortest_holds(built.problem, built.encode(decision))


class _Beginning:
    """The best decision so far, and the time that is left for better ones."""

    def __init__(
        self,
        built: StepProblem,
        execute: Callable[[StepDecision], Executed],
        solver: str,
        options: SolveOptions,
        pool: SolverPool | None,
    ) -> None:
        self.built, self.execute, self.solver, self.options, self.pool = built, execute, solver, options, pool
        self.limit = built.problem.resources[MEMORY].limit
        self.deadline = time.monotonic() + options.time_limit
        self.best: Start | None = None

    def run(self) -> Start | None:
        """Solve the smaller problems one after another."""
        if self._has_layouts() and self._begin_without_limit():
            return self.best
        largest, *others = self.built.starts
        for build in reversed(others):
            self._solve(build(), _MEDIUM if self.best is None else _SMALL)
        self._solve(largest(), _LARGE)
        while self.best is not None and self._has_layouts():
            before = self.best
            self._solve(self._with_layouts(self.best.decision), _LARGE)
            self._solve(self._with_reruns(self.best.decision), _LARGE)
            if self.best is before:
                break
        return self.best

    def _begin_without_limit(self) -> bool:
        """Solve without a limit, then recomputation for those layouts; return whether nothing can be better."""
        free, proved = self._solve(self._free(), _LARGE)
        if proved and self.best is not None:
            return True
        if free is not None:
            self._solve(self._with_layouts(free), _LARGE)
        return False

    def _has_layouts(self) -> bool:
        """Whether layouts are to be decided; else reruns for given layouts are the whole problem."""
        return max(self.built.layouts) > 1

    def _solve(self, smaller: StepProblem, share: float) -> tuple[StepDecision | None, bool]:
        """Solve a problem in a part of the time that is left, keep what is better, and say whether it is optimal."""
        seconds = share * (self.deadline - time.monotonic())
        if seconds < _LEAST_SECONDS:
            return None, False
        options = replace(self.options, time_limit=seconds, initial_choices=self._best_in(smaller))
        found = solve(smaller.problem, self.solver, options, None, self.pool)
        if found.choices is None:
            return None, False
        decision = smaller.decode(found.choices)
        executed = self.execute(decision)
        fits = self.limit is None or executed.peak <= self.limit
        if fits and (self.best is None or executed.cost < self.best.executed.cost):
            self.best = Start(decision, executed)
        return decision, found.status is Status.OPTIMAL

    def _best_in(self, smaller: StepProblem) -> tuple[int, ...] | None:
        """Choices of another problem that mean the best decision, where it has them."""
        if self.best is None:
            return None
        try:
            return encoded(smaller, self.best.decision)
        except ValueError:
            return None

    def _free(self) -> StepProblem:
        """The problem without a limit, where nothing runs again: that could only cost more."""
        kept = {
            i: np.arange(self.built.problem.nodes[i].size) < layouts for i, layouts in enumerate(self.built.layouts)
        }
        alone = self.built.only(kept)
        return replace(alone, problem=without_limit(alone.problem, MEMORY))

    def _with_layouts(self, decision: StepDecision) -> StepProblem:
        """The problem with every layout as in a decision."""
        return self.built.only({i: np.arange(self.built.layouts[i]) == k for i, k in enumerate(decision.layouts)})

    def _with_reruns(self, decision: StepDecision) -> StepProblem:
        """The problem with everything but layouts as in a decision."""
        allowed = {}
        for i, choice in enumerate(self.built.encode(decision)):
            size = self.built.layouts[i]
            allowed[i] = np.arange(self.built.problem.nodes[i].size) // size == choice // size
        return self.built.only(allowed)
