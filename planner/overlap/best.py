"""The fastest of several timetables for one decision, as the replay judges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from planner.graph.operator_graph import OperatorGraph
from planner.overlap.timetable import Room, overlapped
from planner.replay.clocks import StepCosts
from planner.replay.report import ReplayReport
from planner.schedule.instructions import Schedule

TRIALS = ((1.0, False), (1.5, False), (3.0, False), (8.0, False), (1.0, True), (1.5, True), (3.0, True), (8.0, True))
"""How many times their duration gathers start before they are needed, and whether transfers give way."""

ATTEMPTS = 3
"""Limits that are tried for a timetable, which knows its memory only nearly."""


def fastest(
    graph: OperatorGraph,
    serial: Schedule,
    costs: StepCosts,
    limit: int | None,
    replay: Callable[[Schedule], ReplayReport],
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
    """
    best, report = serial, replay(serial)
    room = Room(report.profile.total_during, limit)
    for eagerness, give_way in TRIALS:
        write = partial(overlapped, graph, serial, costs, eagerness=eagerness, give_way=give_way)
        for schedule, found in _within(write, room, replay):
            assert found.total_quanta is not None, found.violations
            assert report.total_quanta is not None
            if found.total_quanta < report.total_quanta:
                best, report = schedule, found
    return best, report


def _within(
    write: Callable[[Room], Schedule], room: Room, replay: Callable[[Schedule], ReplayReport]
) -> Iterator[tuple[Schedule, ReplayReport]]:
    """The timetable if it is within the limit; where it is not, one for a limit lower by what was too much."""
    limit = room.limit
    for _ in range(ATTEMPTS):
        schedule = write(room)
        found = replay(schedule)
        if limit is None or found.peak_bytes <= limit:
            yield schedule, found
            return
        assert room.limit is not None
        room = replace(room, limit=room.limit - (found.peak_bytes - limit))
