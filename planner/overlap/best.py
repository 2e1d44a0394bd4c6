"""The fastest of several timetables for one decision, as the replay judges them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from planner.graph.operator_graph import OperatorGraph
from planner.overlap.buckets import BucketRule
from planner.overlap.timetable import Room, overlapped
from planner.replay.clocks import StepCosts
from planner.replay.report import ReplayReport
from planner.schedule.instructions import Schedule

TRIALS = ((1.0, False), (1.5, False), (3.0, False), (8.0, False), (1.0, True), (1.5, True), (3.0, True), (8.0, True))
"""How many times their duration gathers start before they are needed, and whether transfers give way."""

RULES = (BucketRule(0.25), BucketRule(0.25, 0.05), BucketRule(0.06, 0.2))
"""Rules for buckets, tried with the best of these."""

NEAR = 1.05
"""Rules are tried for a decision whose timetable takes at most so many times as long as the fastest plan so far."""

ATTEMPTS = 3
"""Limits that are tried for a timetable, which knows its memory only nearly."""


def fastest(
    graph: OperatorGraph,
    serial: Schedule,
    costs: StepCosts,
    limit: int | None,
    replay: Callable[[Schedule], ReplayReport],
    known: int | None = None,
) -> tuple[Schedule, ReplayReport]:
    """The fastest schedule of a decision within the limit, that without overlap among them.

    Parameters
    ----------
    graph, serial
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
    report = replay(serial)
    room = Room(report.profile.total_during, limit)
    best, chosen = (serial, report), TRIALS[0]
    for eagerness, give_way in TRIALS:
        write = partial(overlapped, graph, serial, costs, eagerness=eagerness, give_way=give_way)
        if (found := _within(write, room, replay)) is not None and _time(found) < _time(best):
            best, chosen = found, (eagerness, give_way)
    for rule in RULES if known is None or _time(best) <= NEAR * known else ():
        write = partial(overlapped, graph, serial, costs, eagerness=chosen[0], give_way=chosen[1], rule=rule)
        if (found := _within(write, room, replay)) is not None and _time(found) < _time(best):
            best = found
    return best


def _time(timed: tuple[Schedule, ReplayReport]) -> int:
    quanta = timed[1].total_quanta
    assert quanta is not None, timed[1].violations
    return quanta


def _within(
    write: Callable[[Room], Schedule], room: Room, replay: Callable[[Schedule], ReplayReport]
) -> tuple[Schedule, ReplayReport] | None:
    """The timetable if it is within the limit; where it is not, one for a limit lower by what was too much."""
    limit = room.limit
    for _ in range(ATTEMPTS):
        schedule = write(room)
        found = replay(schedule)
        if limit is None or found.peak_bytes <= limit:
            return schedule, found
        assert room.limit is not None
        room = replace(room, limit=room.limit - (found.peak_bytes - limit))
    return None
