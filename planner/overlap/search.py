"""Plans whose communication runs beside the computation: decisions, timetables and a bound on all such plans.

The search begins with the best plan that does not overlap. Then it goes on in rounds. The plans seen so far give the
multipliers (:mod:`planner.overlap.multipliers`), these a canonical problem, and its solution one more plan and a proven
bound on the steps of all plans of the formulation, however they overlap gathers and reductions. Every plan gets its
fastest timetable, which the replay judges.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from formulations.problem.solution import Progress, SolveResult, Status, relative_gap
from formulations.solvers.processes.worker import Ending
from formulations.step.replay import BrokenDecisionError, replay_decision
from formulations.step.solving.solved import SolvedStep
from formulations.step.training_step import StepDecision, StepModel
from planner.common.infeasibility import InfeasibleError
from planner.graph.operator_graph import OperatorGraph
from planner.overlap.best import fastest
from planner.overlap.mixtures import mixtures
from planner.overlap.multipliers import Multipliers
from planner.replay.clocks import StepCosts
from planner.replay.report import ReplayReport
from planner.schedule.instructions import Schedule

ROUNDS = 30
"""Most rounds."""

ROUND_SHARE = 0.3
"""Part of the time that is left that a round may take."""

SERIAL_SHARE = 0.25
"""Part of the time limit for the plan that does not overlap."""

PARTNERS, TIMED = 3, 4
"""Latest plans that a new one is mixed with, and mixtures that get a timetable."""

LEAST_SECONDS = 2.0
"""A round with less time left does not begin."""


@dataclass(frozen=True, slots=True)
class OverlapTask:
    """What the search needs of a planning session.

    Parameters
    ----------
    graph, model
        The step and its tables, with the time on each link.
    axes
        Number of mesh axes.
    limit
        Bytes of tensors on one device, or None.
    costs
        Prices of instructions.
    solve
        Finds the best decision for tables, in so many seconds, from known decisions.
    contains
        Whether the formulation contains a decision: bounds hold for those alone.
    schedule, replay
        Schedule of a decision without overlap, and replay of a schedule.
    """

    graph: OperatorGraph
    model: StepModel
    axes: int
    limit: int | None
    costs: StepCosts
    solve: Callable[[StepModel, float, Sequence[StepDecision]], SolvedStep]
    contains: Callable[[StepDecision], bool]
    schedule: Callable[[StepDecision], Schedule]
    replay: Callable[[Schedule], ReplayReport]


@dataclass(frozen=True, slots=True, eq=False)
class OverlappedStep:
    """The best plan that was found.

    Parameters
    ----------
    schedule, report
        Its schedule and the replay of it.
    result
        Objective, bound and gap in quanta, and how the bound is known.
    bounding
        The solved problem that the bound is of, and by how much its costs are multiplied.
    """

    schedule: Schedule
    report: ReplayReport
    result: SolveResult
    bounding: tuple[SolvedStep, int] | None


def solve_overlapped(
    task: OverlapTask, time_limit: float, gap: float = 0.0, progress: Callable[[Progress], None] | None = None
) -> OverlappedStep:
    """Find a fast plan that overlaps, and a bound on all of them.

    Parameters
    ----------
    task
        The step.
    time_limit
        Seconds.
    gap
        Gap at which the search may end before.
    progress
        Called after every round.
    """
    return _Search(task, time_limit, gap, progress).run()


class _Search:
    def __init__(
        self, task: OverlapTask, time_limit: float, gap: float, progress: Callable[[Progress], None] | None
    ) -> None:
        self._task, self._time_limit, self._gap, self._progress = task, time_limit, gap, progress
        self._begun = time.monotonic()
        self._multipliers = Multipliers(task.model, task.axes)
        self._known: list[StepDecision] = []
        self._best: tuple[Schedule, ReplayReport] | None = None
        self._bound: int | None = None
        self._bounding: tuple[SolvedStep, int] | None = None

    def run(self) -> OverlappedStep:
        serial = self._task.solve(self._task.model, SERIAL_SHARE * self._time_limit, ())
        self._see(serial.decision)
        last = serial
        for _ in range(ROUNDS):
            left = self._time_limit - (time.monotonic() - self._begun)
            if left < LEAST_SECONDS or self._is_near() or Ending.INTERRUPTED in last.result.message:
                break
            weights = self._multipliers.next()
            model = replace(self._task.model, weights=weights)
            try:
                solved = self._task.solve(model, max(LEAST_SECONDS, ROUND_SHARE * left), tuple(self._known))
            except InfeasibleError:
                break  # the solver found nothing in this time; the plans so far fit
            if solved.result.bound is not None:
                bound = -(-solved.result.bound // weights.scale)
                if self._bound is None or bound > self._bound:
                    self._bound, self._bounding = bound, (solved, weights.scale)
                    self._multipliers.keep()
            if solved.decision not in self._known:
                partners = self._known[-PARTNERS:]
                self._see(solved.decision)
                self._mix(solved.decision, partners)
            last = solved
        return self._result(serial)

    def _see(self, decision: StepDecision) -> None:
        """Time a decision, keep it, and learn from its paths."""
        self._known.append(decision)
        self._multipliers.see(replay_decision(self._task.model, decision).tally)
        self._time(decision)

    def _mix(self, decision: StepDecision, partners: Sequence[StepDecision]) -> None:
        """Time the mixtures of a decision with others whose paths are shortest."""
        found: list[tuple[int, StepDecision]] = []
        limit = self._task.limit
        for partner in partners:
            for pair in ((decision, partner), (partner, decision)):
                for mixture in mixtures(self._task.model, *pair):
                    with contextlib.suppress(BrokenDecisionError):
                        executed = replay_decision(self._task.model, mixture)
                        if (limit is None or executed.peak <= limit) and self._task.contains(mixture):
                            found.append((self._multipliers.longest(executed.tally), mixture))
        found.sort(key=lambda entry: entry[0])
        for path, mixture in found[:TIMED]:
            if self._best is None or path < _quanta(self._best[1]):
                self._time(mixture)

    def _time(self, decision: StepDecision) -> None:
        """Find the timetable of a decision, and keep it if it is the fastest."""
        task = self._task
        found = fastest(task.graph, task.schedule(decision), task.costs, task.limit, task.replay)
        if self._best is None or _quanta(found[1]) < _quanta(self._best[1]):
            self._best = found
        if self._progress is not None:
            seconds = time.monotonic() - self._begun
            self._progress(Progress(seconds, _quanta(self._best[1]), self._bound, "overlap"))

    def _is_near(self) -> bool:
        gap = None if self._best is None else relative_gap(_quanta(self._best[1]), self._bound)
        return gap is not None and gap <= self._gap

    def _result(self, serial: SolvedStep) -> OverlappedStep:
        assert self._best is not None
        schedule, report = self._best
        cost, bound = _quanta(report), self._bound
        source = serial.result if self._bounding is None else self._bounding[0].result
        result = replace(
            source,
            objective=cost,
            bound=bound,
            gap=relative_gap(cost, bound),
            status=Status.OPTIMAL if bound == cost else Status.FEASIBLE,
            seconds=time.monotonic() - self._begun,
            proof=None if bound is None else source.proof,
            proved_by="" if bound is None else source.proved_by,
            claimed=None,
            claimed_by="",
        )
        return OverlappedStep(schedule, report, result, self._bounding)


def _quanta(report: ReplayReport) -> int:
    assert report.total_quanta is not None, report.violations
    return report.total_quanta
