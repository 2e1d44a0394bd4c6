"""The best decision of a step within its limit, looked for in smaller problems while there is time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from formulations.problem.solution import SolveOptions, SolveResult, Status
from formulations.step.sharding import MEMORY
from formulations.step.solving.registry import StepProblem
from formulations.step.training_step import StepDecision

_LEAST_SECONDS = 0.02


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


@dataclass(frozen=True, slots=True)
class Solved:
    """A smaller problem's decision, whether it fits when it is executed, and whether it is optimal there."""

    decision: StepDecision
    fits: bool
    optimal: bool


def encoded(built: StepProblem, decision: StepDecision) -> tuple[int, ...]:
    """Choices of a problem that mean a decision, nothing held or waiting longer than needed.

    Raises
    ------
    ValueError
        If the problem leaves the decision out.
    """
    return built.complete(built.problem, built.encode(decision))


def begun_from(built: StepProblem, start: Start | None, options: SolveOptions) -> SolveOptions:
    """Options to solve a problem from a decision of it, if any is known.

    Raises
    ------
    ValueError
        If the problem leaves the decision out.
    """
    return options if start is None else replace(options, initial_choices=encoded(built, start.decision))


class SmallerProblems:
    """The best decision within the limit so far (``best``), and the time that is left for better ones.

    Parameters
    ----------
    built
        The problem under the limit, which contains all decisions.
    execute
        Executes a decision.
    options
        For the smaller problems; the time limit is that of all of them together, from now on.
    search
        Solves one of them, from a decision of it if any is known; returns what a solver found, and the best decision
        known beside it.
    """

    def __init__(
        self,
        built: StepProblem,
        execute: Callable[[StepDecision], Executed],
        options: SolveOptions,
        search: Callable[[StepProblem, Start | None, SolveOptions], tuple[SolveResult, Start | None]],
    ) -> None:
        self.built, self.execute, self.options = built, execute, replace(options, initial_choices=None)
        self.best: Start | None = None
        self._search = search
        self._limit = built.problem.resources[MEMORY].limit
        self._deadline = time.monotonic() + options.time_limit

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._deadline - time.monotonic()

    def end(self) -> None:
        """Leave no time: nothing more begins."""
        self._deadline = -math.inf

    def solve(self, build: Callable[[], StepProblem], share: float) -> Solved | None:
        """Solve a problem in a part of the time that is left; keep its decision where that is better than the best.

        Returns
        -------
        Solved or None
            None where nothing was found, or there was no time.
        """
        if self.left < _LEAST_SECONDS:
            return None
        smaller = build()
        options = replace(self.options, time_limit=share * self.left)
        if options.time_limit < _LEAST_SECONDS:
            return None
        found, beside = self._search(smaller, self._best_in(smaller), options)
        if beside is not None:
            self.take(beside)
        if found.choices is None:
            return None
        decision = smaller.decode(found.choices)
        fits = self.keep(decision)
        if not fits and smaller.safer is not None:
            self.solve(smaller.safer, share)
        return Solved(decision, fits, found.status is Status.OPTIMAL and found.bound == found.objective)

    def keep(self, decision: StepDecision) -> bool:
        """Execute a decision, keep it where it is the cheapest within the limit so far, and say whether it fits."""
        executed = self.execute(decision)
        fits = self._limit is None or executed.peak <= self._limit
        if fits:
            self.take(Start(decision, executed))
        return fits

    def take(self, start: Start) -> None:
        """Keep a decision within the limit where it is the cheapest so far."""
        if self.best is None or start.executed.cost < self.best.executed.cost:
            self.best = start

    def _best_in(self, smaller: StepProblem) -> Start | None:
        """The best decision, where another problem has it."""
        if self.best is None:
            return None
        try:
            smaller.encode(self.best.decision)
        except ValueError:
            return None
        return self.best
