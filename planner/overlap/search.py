"""Plans whose communication runs beside the computation: decisions, timetables and a bound on all such plans.

The search begins with the best plan that does not overlap, and the best one if transfers cost half of their time. Then
it goes on in rounds. The plans seen so far give the
multipliers (:mod:`planner.overlap.multipliers`), these a canonical problem, and its solution one more plan and a proven
bound on the steps of all plans of the formulation, however they overlap gathers and reductions. Every plan gets its
fastest timetable, which the replay judges.

Rounds without a memory limit take a fraction of the time, and their bounds hold within it too. So they come first,
until their bound rises no more, and the rounds within the limit begin from their multipliers. At last, layers of the
best plan are exchanged for those of the others, while that makes it faster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from formulations.problem.solution import Progress, SolveResult, Status, relative_gap
from formulations.solvers.processes.worker import Ending
from formulations.step.replay import replay_decision
from formulations.step.solving.solved import SolvedStep
from formulations.step.training_step import StepDecision
from planner.common.infeasibility import InfeasibleError
from planner.overlap.fastest_plan import FastestPlan
from planner.overlap.multipliers import Multipliers, transfers_at
from planner.overlap.task import OverlapTask, Solve, quanta
from planner.replay.report import ReplayReport
from planner.schedule.instructions import Schedule

ROUNDS = 30
"""Most rounds."""

ROUND_SHARE = 0.6
"""Part of the time that is left that a round may take."""

SERIAL_SHARE, HALF_SHARE, RELAXED_SHARE, EXCHANGE_SHARE = 0.15, 0.12, 0.06, 0.1
"""Parts of the time limit: for the plan that does not overlap, that with transfers at half their cost, rounds without a
memory limit, and exchanged layers."""

ROUND_GAP = 0.002
"""Gap at which a round may end."""

PARTNERS = 3
"""Latest plans that a new one is mixed with."""

LEAST_SECONDS = 2.0
"""A round with less time left does not begin."""


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
        self._multipliers = Multipliers(task.model, task.axes, task.costs.slowdowns)
        self._plans = FastestPlan(task, self._multipliers.least)
        self._known: list[StepDecision] = []
        self._relaxed: list[StepDecision] = []
        """Decisions without the limit: they may exceed it, but a part of their layers need not."""
        self._bound: int | None = None
        self._bounding: tuple[SolvedStep, int] | None = None
        self._stopped = False

    def run(self) -> OverlappedStep:
        serial = self._task.solve(self._task.model, SERIAL_SHARE * self._time_limit, self._gap, ())
        self._stopped = Ending.INTERRUPTED in serial.result.message
        self._see(serial.decision)
        # Ctrl-C while timetables are written ends the search as it does while a solver runs.
        try:
            self._improve(serial.decision)
        except KeyboardInterrupt:
            self._stopped = True
        self._report()
        return self._result(serial)

    def _improve(self, serial: StepDecision) -> None:
        if self._left() > 0.0:
            self._half_hidden()
        if self._task.solve_relaxed is not None:
            self._relaxed_rounds(serial, self._task.solve_relaxed)
        self._rounds()
        self._plans.exchange([*self._known[::-1], *self._relaxed[::-1]], self._left)

    # ------------------------------------------------------------------ rounds

    def _left(self, kept: float = 0.0) -> float:
        """Seconds that are left, but for a part of the time limit; none where the search is to stop."""
        left = (1.0 - kept) * self._time_limit - (time.monotonic() - self._begun)
        return 0.0 if self._stopped or self._is_near() else left

    def _round(self, multipliers: Multipliers, solve: Solve, seconds: float) -> StepDecision | None:
        """Solve the problem of the next multipliers; its solution is a plan, its bound one on all plans."""
        weights = multipliers.next()
        model = replace(self._task.model, weights=weights)
        known = () if solve is self._task.solve_relaxed else tuple(self._known)
        try:
            solved = solve(model, seconds, max(self._gap, ROUND_GAP), known)
        except InfeasibleError:
            return None  # the solver found nothing in this time
        self._stopped = Ending.INTERRUPTED in solved.result.message
        if solved.result.bound is not None:
            bound = -(-solved.result.bound // weights.scale)
            if multipliers.raised(bound) and (self._bound is None or bound > self._bound):
                self._bound, self._bounding = bound, (solved, weights.scale)
        self._report()
        return solved.decision

    def _half_hidden(self) -> None:
        """See the best plan if half of every transfer's time is hidden: a guess that needs no multipliers."""
        model = replace(self._task.model, weights=transfers_at(self._task.model, self._task.axes, 0.5))
        seconds = HALF_SHARE * self._time_limit
        with contextlib.suppress(InfeasibleError):
            solved = self._task.solve(model, seconds, max(self._gap, ROUND_GAP), tuple(self._known))
            self._stopped = Ending.INTERRUPTED in solved.result.message
            if solved.decision not in self._known:
                self._see(solved.decision)

    def _relaxed_rounds(self, serial: StepDecision, solve: Solve) -> None:
        """Multipliers without the memory limit, from which the rounds within it go on."""
        relaxed = Multipliers(self._task.model, self._task.axes, self._task.costs.slowdowns)
        relaxed.see(replay_decision(self._task.model, serial).tally)
        until = time.monotonic() + RELAXED_SHARE * self._time_limit
        while (left := min(self._left(), until - time.monotonic())) > 0.0 and not relaxed.has_stalled:
            decision = self._round(relaxed, solve, max(LEAST_SECONDS, left))
            if decision is None:
                break
            if decision not in self._relaxed:
                self._relaxed.append(decision)
                relaxed.see(replay_decision(self._task.model, decision).tally)
        self._multipliers.begin_from(relaxed)

    def _rounds(self) -> None:
        for _ in range(ROUNDS):
            left = self._left(EXCHANGE_SHARE)
            if left < LEAST_SECONDS or self._multipliers.has_stalled:
                return
            decision = self._round(self._multipliers, self._task.solve, max(LEAST_SECONDS, ROUND_SHARE * left))
            if decision is None:
                return  # the plans so far fit
            if decision not in self._known:
                partners = [*self._known[-PARTNERS:], *self._relaxed[-1:]]
                self._see(decision)
                self._plans.mix(decision, partners, self._left)
                self._report()

    def _see(self, decision: StepDecision) -> None:
        """Time a decision, keep it, and learn from its times in windows."""
        self._known.append(decision)
        self._multipliers.see(replay_decision(self._task.model, decision).tally)
        self._plans.consider(decision)
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            seconds = time.monotonic() - self._begun
            self._progress(Progress(seconds, self._plans.quanta, self._bound, "overlap"))

    def _is_near(self) -> bool:
        cost = self._plans.quanta
        gap = None if cost is None else relative_gap(cost, self._bound)
        return gap is not None and gap <= self._gap

    def _result(self, serial: SolvedStep) -> OverlappedStep:
        best = self._plans.best
        assert best is not None, "the plan that does not overlap was offered"
        cost, bound = quanta(best.report), self._bound
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
            message=Ending.INTERRUPTED if self._stopped else source.message,
        )
        return OverlappedStep(best.schedule, best.report, result, self._bounding)
