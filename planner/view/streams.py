"""What runs when and on which stream, for timelines and traces."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.operator_graph import OperatorGraph, Phase
from planner.replay.streams import INWARD, OUTWARD, StepTime
from planner.replay.structure import communicating_axes
from planner.schedule.instructions import Compute, Instruction, Reshard, Schedule, Update, Wait
from planner.view.naming import COPY_IN, COPY_OUT, LOCAL_RESHARD, UPDATE, kind_of

FORWARD, BACKWARD, AGAIN = "forward", "backward", "recomputed"
BLOCKING, BESIDE, STALL = "collective, awaited", "collective, overlapped", "waiting"
GROUPS = (FORWARD, BACKWARD, AGAIN, UPDATE, LOCAL_RESHARD, BLOCKING, BESIDE, COPY_OUT, COPY_IN, STALL)
"""Groups of instructions on a timeline, in the order of a legend."""
COMPUTATION = "computation"


@dataclass(frozen=True, slots=True)
class Interval:
    """An instruction on a stream, in nanoseconds since the start of the step."""

    stream: str
    group: str
    start: int
    end: int
    instruction: int


def intervals_of(graph: OperatorGraph, schedule: Schedule, time: StepTime) -> tuple[Interval, ...]:
    """What runs when; what takes no time is left out.

    A collective that the computation waits for is on the links of its axes and not on the computation's stream.

    Parameters
    ----------
    graph, schedule
        The step and its schedule.
    time
        Its predicted times.
    """
    found, start = [], 0
    for at, (entry, length) in enumerate(zip(schedule.instructions, time.durations, strict=True)):
        if length:
            group = group_of(graph, entry)
            axes = communicating_axes(entry.path) if isinstance(entry, Reshard) and group == BLOCKING else ()
            streams = dict.fromkeys(map(link_name, axes)) or (COMPUTATION,)
            found += [Interval(stream, group, start, start + length, at) for stream in streams]
        start += length
    for beside in time.beside:
        group = {OUTWARD: COPY_OUT, INWARD: COPY_IN}.get(beside.link, BESIDE)
        found.append(Interval(link_name(beside.link), group, beside.start, beside.end, beside.instruction))
    return tuple(found)


def group_of(graph: OperatorGraph, entry: Instruction) -> str:
    """Group of :data:`GROUPS` of what the computation's stream does with an instruction."""
    match entry:
        case Compute(operator, recompute=recompute):
            phase = FORWARD if graph.operators[operator].phase is Phase.FORWARD else BACKWARD
            return AGAIN if recompute else phase
        case Reshard(path=path, overlapped=False):
            return BLOCKING if communicating_axes(path) else LOCAL_RESHARD
        case Update():
            return UPDATE
        case _:
            return STALL


def kind_of_time(graph: OperatorGraph, entry: Instruction) -> str:
    """Kind of an instruction by what the computation's stream spends its time on."""
    if isinstance(entry, Compute | Reshard | Update | Wait):
        return kind_of(graph, entry)
    return "wait for a copy"


def link_name(link: int) -> str:
    """Stream of a mesh axis, or of copies to or from the host."""
    return {OUTWARD: "to the host", INWARD: "from the host"}.get(link, f"link of axis {link}")
