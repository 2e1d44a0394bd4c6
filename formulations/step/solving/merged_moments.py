"""Search in relaxations with merged moments (:mod:`formulations.step.moment_classes`): a bound and decisions at once.

The classes begin as the times divide them at which memory has a price. The relaxation is solved; its decisions are
executed with their reruns as late in their classes as they may be. Where an optimum is within the limit, it is one of
the problem itself. Where a decision is over it, classes are divided at the times where it is, and the relaxation of
those is next. Every relaxation's bound holds for the problem.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from formulations.problem.checker import check, usage_profile
from formulations.problem.solution import Progress
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import solve
from formulations.solvers.prices.priced_times import priced_times
from formulations.solvers.running.lanes import runs_alone
from formulations.step.modes import Modes
from formulations.step.moment_classes import MomentClasses, at_times
from formulations.step.sharding import MEMORY, within
from formulations.step.solving.search import LEAST_SECONDS, Attempt, Search, begun_from
from formulations.step.solving.step_problem import Choices, StepProblem
from formulations.step.timeline import Timeline, build_timeline
from formulations.step.training_step import StepDecision, StepModel

_PRICES_SHARE = 0.2
"""Part of the time left for price steps, at most."""

_LAYOUTS_SHARE = 1 / 8
"""Part of the time left for the problem with the layouts of a decision that is over the limit."""

_PATIENCE_SECONDS, _PATIENCE = 0.3, 0.3
"""How long a relaxation whose best decision is near its bound and over the limit goes on without a better one: seconds,
and a part of the time that it took to find it."""

_OVER_SHARES = 0.25, 0.45
"""Parts of its time between which a relaxation ends whose best decision is over the limit; later it goes on for the
bound, since too little is left for a finer one."""

_NEAR = 0.01
"""Gap of a relaxation from which on its decisions hardly become cheaper."""


@dataclass(frozen=True, slots=True)
class MergedMoments:
    """Relaxations of a problem of chains.

    Parameters
    ----------
    model
        The step's tables.
    modes
        Modes of the problem, each with one moment.
    memory_limit
        Bytes on one device.
    build
        Builds the problem of reruns at the first moments of classes, without a limit.
    pin
        Restricts a relaxation to what is left to some nodes.
    """

    model: StepModel
    modes: Modes
    memory_limit: int
    build: Callable[[MomentClasses], StepProblem]
    pin: Callable[[StepProblem], StepProblem] = lambda built: built

    def divided_at_prices(self, built: StepProblem, deadline: float) -> MomentClasses:
        """Classes that count the times at which memory has a price in the problem itself."""
        classes = MomentClasses.widest(self.model, self.modes)
        return classes.divided(self._timeline(self.modes), priced_times(built.problem, deadline))

    def moved(self, classes: MomentClasses, relaxed: StepDecision) -> StepDecision:
        """A relaxation's decision with reruns as late in their classes as they are needed."""
        return replace(relaxed, recomputed=classes.within(self.modes, self.model, relaxed.recomputed))

    def divided(self, classes: MomentClasses, built: StepProblem, relaxed: StepDecision) -> MomentClasses:
        """Classes that rule a relaxation's decision out, where reruns leave their classes or it is over the limit.

        They count the worst of every span of times at which it is over the limit in the problem itself.
        """
        decision = self.moved(classes, relaxed)
        finer = classes.divided_before(self._out_of_order(relaxed, decision))
        if not built.contains(decision):
            return finer
        usage = usage_profile(built.problem, built.encoded(decision))[MEMORY]
        over = np.flatnonzero(usage > self.memory_limit)
        spans = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1) if len(over) else []
        return finer.divided(self._timeline(self.modes), [int(span[np.argmax(usage[span])]) for span in spans])

    def _out_of_order(self, relaxed: StepDecision, moved: StepDecision) -> list[int]:
        """The first moments in their classes of operators that are needed there before any of them.

        Such a rerun is moved to an earlier class, where memory may be short, or to a moment that is none of its own.
        Classes that begin with those moments keep it after what needs it, which no decision may.
        """
        found = []
        for i, (moment,) in moved.recomputed.items():
            in_class = [mode[0] for mode in self.modes[i] if mode[0] >= relaxed.recomputed[i][0]]
            if in_class and moment < in_class[0]:
                found.append(in_class[0])
        return found

    def relaxation(self, classes: MomentClasses) -> StepProblem:
        """The relaxation by some classes; it decodes to reruns at the first moments of classes."""
        built, modes = self.build(classes), self.modes

        def build() -> StrategyProblem:
            counted = classes.counted(self._timeline(classes.merged(modes)))
            return within(at_times(built.problem, np.flatnonzero(counted)), self.memory_limit)

        def encode(decision: StepDecision) -> Choices:
            moved = {i: (classes.first(moment),) for i, (moment,) in decision.recomputed.items()}
            return built.encode(replace(decision, recomputed=moved))

        relaxed = replace(built, build=cache(build), memory_limit=self.memory_limit, encode=encode)
        return self.pin(relaxed)

    def _timeline(self, modes: Modes) -> Timeline:
        return build_timeline(self.model, {i: [moment for (moment,) in of_node] for i, of_node in modes.items()})


def search_merged(search: Search) -> None:
    """Solve relaxations with finer and finer classes, until a decision within the limit is their optimum.

    Decisions and bounds are kept in the search.
    """
    merged = search.built.merged
    assert merged is not None
    classes = merged.divided_at_prices(search.built, time.monotonic() + _PRICES_SHARE * search.left)
    while search.left > LEAST_SECONDS and not search.context.interrupted.is_set():
        relaxation = merged.relaxation(classes)
        options = begun_from(relaxation, search.best, search.context.options)
        options = replace(options, time_limit=max(LEAST_SECONDS, search.left))
        watch = _Watch(search, partial(_decision, merged, classes, relaxation), options.time_limit)
        found = solve(
            relaxation.problem, search.context.solver, options, watch.report, search.context.pool, watch.is_over
        )
        search.context.noted(found)
        search.learn(found.known_bound)
        if found.choices is None:
            return
        relaxed = relaxation.decode(found.choices)
        decision = merged.moved(classes, relaxed)
        finer = merged.divided(classes, search.built, relaxed)
        if _keep(search, decision):
            if watch.stopped:
                continue
            return
        if finer == classes:
            return
        search.solve(Attempt(partial(search.built.with_layouts_of, decision), _LAYOUTS_SHARE, patient=False))
        classes = finer


def _decision(merged: MergedMoments, classes: MomentClasses, relaxation: StepProblem, choices: Choices) -> StepDecision:
    """The problem's decision for choices of a relaxation."""
    return merged.moved(classes, relaxation.decode(choices))


def _keep(search: Search, decision: StepDecision) -> bool:
    """Keep a decision that is one of the problem and within the limit, and say whether it is."""
    if not search.built.contains(decision):
        return False
    return check(search.built.problem, search.built.encoded(decision)).ok and search.keep(decision)


class _Watch:
    """Executes what a relaxation finds, and ends it where its best decision is over the limit."""

    def __init__(self, search: Search, decode: Callable[[Choices], StepDecision], seconds: float) -> None:
        self._search, self._decode, self._seconds = search, decode, seconds
        self._begun = self._improved = time.monotonic()
        self._fits = True
        self._is_alone = runs_alone(search.context.options)  # then the clock must not decide
        self.stopped = False
        self._bound: int | None = None
        self._cost: int | None = None

    def report(self, line: Progress) -> None:
        """Take a line of progress."""
        self._bound = line.bound
        best = self._search.best
        cost = None if best is None else best.executed.cost
        self._search.report(replace(line, incumbent=cost, choices=None, claimed=None))
        if line.choices is not None:
            self._cost = line.incumbent
            self._fits, self._improved = _keep(self._search, self._decode(line.choices)), time.monotonic()

    def is_over(self) -> bool:
        """Whether to stop."""
        best, bound = self._search.best, self._bound
        if best is not None and bound is not None and self._search.context.options.accepts(best.executed.cost, bound):
            return True
        if self._is_alone:
            return False
        now = time.monotonic()
        is_near = self._cost is not None and bound is not None and self._cost - bound <= _NEAR * self._cost
        patience = _PATIENCE_SECONDS + _PATIENCE * (self._improved - self._begun)
        is_late = _OVER_SHARES[0] < (now - self._begun) / self._seconds < _OVER_SHARES[1]
        self.stopped |= not self._fits and (is_late or (is_near and now - self._improved > patience))
        return self.stopped
