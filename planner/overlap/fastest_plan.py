"""The fastest plan that was found: decisions that are timed, mixed, and exchanged layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from formulations.step.replay import BrokenDecisionError, Tally, replay_decision
from formulations.step.training_step import StepDecision
from planner.overlap.best import fastest
from planner.overlap.mixtures import exchanges, mixtures
from planner.overlap.task import OverlapTask, quanta
from planner.replay.report import ReplayReport
from planner.schedule.instructions import Schedule

TIMED = 4
"""Mixtures of two decisions that get a timetable."""


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """A decision with its fastest timetable, and the replay of that."""

    decision: StepDecision
    schedule: Schedule
    report: ReplayReport


class FastestPlan:
    """Keeps the fastest of all plans that it is offered.

    Parameters
    ----------
    task
        The step.
    least
        Bound on the time of a decision from its costs, however it overlaps.
    """

    def __init__(self, task: OverlapTask, least: Callable[[Tally], int]) -> None:
        self._task, self._least = task, least
        self.best: TimedPlan | None = None

    @property
    def quanta(self) -> int | None:
        """Time of the fastest plan."""
        return None if self.best is None else quanta(self.best.report)

    def consider(self, decision: StepDecision) -> bool:
        """Time a decision if it may be the fastest; whether it is."""
        bound = self._bound(decision)
        return bound is not None and (self.quanta is None or bound < self.quanta) and self.offer(decision)

    def offer(self, decision: StepDecision) -> bool:
        """Time a decision; whether it is the fastest."""
        task = self._task
        schedule, report = fastest(
            task.graph, task.schedule(decision), task.costs, task.limit, task.replay, self.quanta
        )
        if self.quanta is not None and quanta(report) >= self.quanta:
            return False
        self.best = TimedPlan(decision, schedule, report)
        return True

    def mix(self, decision: StepDecision, partners: Sequence[StepDecision], left: Callable[[], float]) -> None:
        """Time the mixtures of a decision with others that could be the fastest, while there is time."""
        pairs = [pair for partner in partners for pair in ((decision, partner), (partner, decision))]
        every = (mixture for pair in pairs for mixture in mixtures(self._task.model, *pair))
        found = [(bound, mixture) for mixture in every if (bound := self._bound(mixture)) is not None]
        for bound, mixture in sorted(found, key=lambda entry: entry[0])[:TIMED]:
            if left() > 0.0 and (self.quanta is None or bound < self.quanta):
                self.offer(mixture)

    def exchange(self, others: Iterable[StepDecision], left: Callable[[], float]) -> None:
        """Exchange layers of the fastest plan for those of others while that makes it faster and there is time."""
        sources = list(others)
        improved = self.best is not None
        while improved:
            assert self.best is not None
            improved = False
            for other in sources:
                for candidate in exchanges(self._task.model, self.best.decision, other):
                    if left() <= 0.0:
                        return
                    improved |= self.consider(candidate)

    def _bound(self, decision: StepDecision) -> int | None:
        """The bound of a decision; None where it is not lawful, within the limit, and of the formulation."""
        try:
            executed = replay_decision(self._task.model, decision)
        except BrokenDecisionError:
            return None
        limit = self._task.limit
        if (limit is not None and executed.peak > limit) or not self._task.contains(decision):
            return None
        return self._least(executed.tally)
