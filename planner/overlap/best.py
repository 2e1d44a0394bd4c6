"""The fastest of several timetables for one decision, as the replay judges them."""

from __future__ import annotations

from collections.abc import Callable

from planner.graph.operator_graph import OperatorGraph
from planner.overlap.timetable import Room, overlapped
from planner.replay.clocks import StepCosts
from planner.replay.report import ReplayReport
from planner.schedule.instructions import Schedule

EAGERNESS = (1.0, 1.5, 3.0, 8.0)
"""How many times their duration gathers start before they are needed, tried one after another."""


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
    for eagerness in EAGERNESS:
        schedule = overlapped(graph, serial, costs, room, eagerness)
        found = replay(schedule)
        assert found.total_quanta is not None, found.violations
        assert report.total_quanta is not None
        fits = limit is None or found.peak_bytes <= max(limit, report.peak_bytes)
        if fits and found.total_quanta < report.total_quanta:
            best, report = schedule, found
    return best, report
