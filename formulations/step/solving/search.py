"""Search for the best decision of a step within its limit, through a sequence of problems."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from formulations.problem.solution import KnownBound, Progress, SolveOptions, SolveResult, Status
from formulations.step.solving.context import Candidate, SolveContext
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import StepDecision

LEAST_SECONDS = 0.02
"""Time below which no problem is begun."""

_ENTRIES_A_SECOND = 8_000_000
"""Entries of distinct tables that presolve and the solver's start read in a second."""

_MOST_EARLIER = 3
"""Earlier incumbents that are executed at most."""


class Phase(Enum):
    """Phase of a stage: before the solver, before it with time of its own, or in parallel to it."""

    BEGIN = "begin"
    WIDEN = "widen"
    BESIDE = "beside"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A problem to solve.

    Parameters
    ----------
    build
        Builds it.
    share
        Its part of the time that is left.
    patient
        Whether to go on however long the incumbent does not improve.
    gap
        Gap at which it is solved well enough.
    """

    build: Callable[[], StepProblem]
    share: float
    patient: bool = True
    gap: float = 0.0


@dataclass(frozen=True, slots=True)
class Solved:
    """A smaller problem's decision, whether it fits when it is executed, and what is proven in the smaller problem."""

    decision: StepDecision
    fits: bool
    bound: KnownBound | None
    optimal: bool


Find = Callable[[StepProblem, Candidate | None, SolveOptions, bool], tuple[SolveResult, Candidate | None]]
"""Solves a problem from a decision of it, if any is known; the flag is :attr:`Attempt.patient`.

Returns the solver's result, and the best decision of restrictions solved in parallel.
"""


class Search:
    """The best decision within the limit so far, and the time that is left for better ones.

    Parameters
    ----------
    built
        The problem under the limit, which contains all decisions.
    context
        The time limit is that of all smaller problems together, from now on.
    find
        Solves one of them.
    on_first
        Called with the cost of the first decision within the limit.

    Attributes
    ----------
    best
        The cheapest decision within the limit so far.
    reference
        The decision without a limit where one is known: its layouts are tried with reruns.
    finished
        Whether the best decision is known to be optimal, or only the problem without a limit may have a better one.
    bound
        The best lower bound of the problem that a stage has proved.
    report
        Called with the best cost and bound of a stage that takes long.
    """

    def __init__(
        self,
        built: StepProblem,
        context: SolveContext,
        find: Find,
        on_first: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.built = built
        self.context = replace(context, options=replace(context.options, initial_choices=None), progress=None)
        self.best: Candidate | None = None
        self.reference: StepDecision | None = None
        self.finished = False
        self.bound: KnownBound | None = None
        self.report: Callable[[Progress], None] = lambda _: None
        self.find, self._on_first, self._announced = find, on_first, False
        self._limit = built.memory_limit
        self._deadline = time.monotonic() + context.options.time_limit

    @cached_property
    def is_deep(self) -> bool:
        """Whether the solver begins with patterns of repeated blocks, so that restrictions are solved beside it."""
        return self.context.solves_by_patterns(self.built.problem)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._deadline - time.monotonic()

    def end(self) -> None:
        """End the search: set the remaining time to zero."""
        self._deadline = -math.inf
        self.finished = True

    def solve(self, attempt: Attempt) -> Solved | None:
        """Solve a problem in a part of the time that is left; keep its decision where that is better than the best.

        Returns
        -------
        Solved or None
            None where nothing was found, or there was no time.
        """
        if self.left < LEAST_SECONDS or self.context.interrupted.is_set():
            return None
        smaller = attempt.build()
        options = replace(self.context.options, time_limit=attempt.share * self.left, relative_gap=attempt.gap)
        if options.time_limit < LEAST_SECONDS or (self.best is not None and _is_too_large(smaller, options.time_limit)):
            return None
        found, beside = self.find(smaller, self.best_in(smaller), options, attempt.patient)
        self.context.noted(found)
        if beside is not None:
            self.take(beside)
        if found.choices is None:
            return None
        decision = smaller.decode(found.choices)
        fits = self.keep(decision)
        if not fits and smaller.overestimate is not None:
            self.solve(replace(attempt, build=smaller.overestimate))
        optimal = found.status is Status.OPTIMAL and found.bound == found.objective
        return Solved(decision, fits, found.known_bound, optimal)

    def keep(self, decision: StepDecision) -> bool:
        """Execute a decision, keep it where it is the cheapest within the limit so far, and say whether it fits."""
        return self.execute(decision) is not None

    def execute(self, decision: StepDecision) -> Candidate | None:
        """Execute a decision and keep it where it is the cheapest within the limit so far; None where it is over it."""
        candidate = Candidate(decision, self.context.execute(decision))
        if self._limit is not None and candidate.executed.peak > self._limit:
            return None
        self.take(candidate)
        return candidate

    def take(self, candidate: Candidate) -> None:
        """Keep a decision within the limit where it is the cheapest so far."""
        self.announce(candidate.executed.cost)
        self.best = cheaper(self.best, candidate)

    def learn(self, bound: KnownBound | None) -> None:
        """Keep a lower bound of the problem where it is the best so far."""
        if bound is not None and (self.bound is None or bound.value > self.bound.value):
            self.bound = bound

    def announce(self, cost: int) -> None:
        """Report the cost of the first decision within the limit, once."""
        if not self._announced:
            self._announced = True
            self._on_first(cost)

    def best_in(self, smaller: StepProblem) -> Candidate | None:
        """The best decision, if another problem contains it."""
        if self.best is None:
            return None
        try:
            smaller.encode(self.best.decision)
        except ValueError:
            return None
        return self.best


def cheaper(first: Candidate | None, second: Candidate | None) -> Candidate | None:
    """The cheaper of two decisions within the limit, where both are known; the first if they cost the same."""
    if first is None or second is None:
        return second if first is None else first
    return second if second.executed.cost < first.executed.cost else first


def begun_from(built: StepProblem, start: Candidate | None, options: SolveOptions) -> SolveOptions:
    """Options to solve a problem from a decision of it, if any is known.

    Raises
    ------
    ValueError
        If the problem leaves the decision out.
    """
    return options if start is None else replace(options, initial_choices=built.encoded(start.decision))


class Incumbents:
    """Incumbents that a solver reported, of which earlier ones are executed if the last one is worse than predicted.

    Executed, a decision may cost more than in its problem, or need more memory: copies stall for memory, or bytes were
    counted too low. Then an incumbent of slightly higher cost in the problem is often cheaper.

    Parameters
    ----------
    search
        Executes and keeps decisions.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self._reported: list[tuple[int, tuple[int, ...]]] = []

    def report(self, line: Progress) -> None:
        """Take a line of progress."""
        if line.choices is not None and line.incumbent is not None:
            self._reported.append((line.incumbent, line.choices))

    def execute_before_last(self, deadline: float) -> None:
        """Execute the incumbents before the last one that may be cheaper than the best known decision.

        Parameters
        ----------
        deadline
            Of :func:`time.monotonic`; after it nothing more is executed.
        """
        for cost, choices in self._reported[-2 : -2 - _MOST_EARLIER : -1]:
            known = self._search.best
            if time.monotonic() > deadline or (known is not None and cost >= known.executed.cost):
                break
            self._search.keep(self._search.built.decode(choices))


def _is_too_large(built: StepProblem, seconds: float) -> bool:
    """Return whether reading a problem alone would take some seconds."""
    arrays = {id(factor.cost): factor.cost.size for factor in built.problem.factors}
    arrays |= {id(term.amount): term.amount.size for _, term in built.problem.usage_terms()}
    return sum(arrays.values()) > _ENTRIES_A_SECOND * seconds
