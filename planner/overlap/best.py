"""The fastest of several timetables for one decision, as the replay judges them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

from planner.graph.operator_graph import OperatorGraph
from planner.overlap.buckets import BucketRule
from planner.overlap.serial import SerialSchedule
from planner.overlap.timetable import APART, Room, overlapped
from planner.replay.clocks import StepCosts
from planner.replay.report import ReplayReport
from planner.schedule.instructions import Schedule

TRIALS = ((3.0, True), (8.0, True), (1.5, True), (1.0, True), (3.0, False), (8.0, False), (1.5, False), (1.0, False))
"""How many times their duration gathers start before they are needed, and whether transfers give way."""

RULES = (BucketRule(0.25), BucketRule(0.25, 0.05), BucketRule(0.06, 0.2))
"""Rules for buckets, tried with the best of these."""

NEAR = 1.05
"""Timetables are replayed, and rules tried, that take less than so many times as long as the fastest plan so far."""

ATTEMPTS = 3
"""Limits that are tried for a timetable, which knows its memory only nearly."""


def fastest(
    graph: OperatorGraph,
    schedule: Schedule,
    costs: StepCosts,
    limit: int | None,
    replay: Callable[[Schedule], ReplayReport],
    known: int | None = None,
) -> tuple[Schedule, ReplayReport]:
    """The fastest schedule of a decision within the limit, that without overlap among them.

    Parameters
    ----------
    graph, schedule
        The step and a correct schedule of the decision without overlap.
    costs
        Prices of instructions.
    limit
        Bytes of one device, or None.
    replay
        Replays a schedule with its costs.
    known
        Time of the fastest plan so far, or None.
    """
    report = replay(schedule)
    serial, room = SerialSchedule(graph, schedule, costs), Room(report.profile.total_during, limit)
    best, chosen = (schedule, report), TRIALS[0]
    most = inf if known is None else NEAR * known

    def faster(eagerness: float, give_way: bool, rule: BucketRule = APART) -> tuple[Schedule, ReplayReport] | None:
        """A timetable within the limit that takes less than the best one so far and most."""
        write = partial(overlapped, serial, eagerness=eagerness, give_way=give_way, rule=rule)
        return _within(write, room, lambda found: serial.time_of(found) < min(_time(best), most), replay)

    for trial in TRIALS:
        if (found := faster(*trial)) is not None:
            best, chosen = found, trial
    for rule in RULES if _time(best) < most else ():
        best = faster(*chosen, rule) or best
    return best


def _time(timed: tuple[Schedule, ReplayReport]) -> int:
    quanta = timed[1].total_quanta
    assert quanta is not None, timed[1].violations
    return quanta


def _within(
    write: Callable[[Room], Schedule],
    room: Room,
    is_faster: Callable[[Schedule], bool],
    replay: Callable[[Schedule], ReplayReport],
) -> tuple[Schedule, ReplayReport] | None:
    """The timetable if it is within the limit; where it is not, one for a limit lower by what was too much."""
    limit = room.limit
    for _ in range(ATTEMPTS):
        schedule = write(room)
        if not is_faster(schedule):
            return None
        found = replay(schedule)
        if limit is None or found.peak_bytes <= limit:
            return schedule, found
        assert room.limit is not None
        room = replace(room, limit=room.limit - (found.peak_bytes - limit))
    return None
