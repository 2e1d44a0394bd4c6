"""Predicted time of a replayed schedule, in whole quanta: prices of its instructions, run on streams.

The compute stream runs the instructions in order; copies and overlapped collectives run beside it
(:mod:`planner.replay.streams`). A step ends when its last instruction does. Without either its time is the plain sum of
the instructions' own costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.graph.operator_graph import OperatorGraph
from planner.graph.placement import Placement
from planner.machine.cluster import HostCopies
from planner.replay.memory import LocalBytes
from planner.replay.report import Violation, ViolationKind
from planner.replay.streams import Slowdowns, StepTime, Streams
from planner.replay.structure import strategy_of
from planner.replay.wording import Wording
from planner.schedule.instructions import (
    Compute,
    Instruction,
    Offload,
    Prefetch,
    Reshard,
    Schedule,
    Update,
    buckets,
    waits,
)


@dataclass(frozen=True, slots=True)
class BucketCosts:
    """Costs of a bucket in quanta.

    Parameters
    ----------
    links
        Share of each part in the collective.
    packed, unpacked
        Copies of all sources into the flat buffer that is sent, and of all targets out of that which is received.
    """

    links: tuple[int, ...]
    packed: int
    unpacked: int


class StepCosts(Protocol):
    """Costs in an integer quantum of time; views cost nothing and are never queried.

    Each method raises KeyError for an instruction without a price. Host copies and
    slowdowns are queried only for a schedule that has copies or overlapped collectives.
    """

    @property
    def host_copies(self) -> HostCopies:
        """Concurrency of copies between device and host."""

    @property
    def slowdowns(self) -> Slowdowns:
        """Slowdowns of the computation and of overlapped collectives beside each other."""

    def compute_quanta(
        self, operator: int, outputs: tuple[Placement | None, ...], inputs: tuple[Placement, ...]
    ) -> int:
        """Cost of one execution of an operator under these placements."""

    def reshard_quanta(self, value: int, path: tuple[Placement, ...], in_place: bool) -> int:
        """Cost of a resharding path of a value."""

    def bucket_quanta(self, parts: Sequence[tuple[int, tuple[Placement, ...]]]) -> BucketCosts:
        """Costs of a bucket, whose parts are values and paths of a single collective."""

    def update_quanta(self, parameter: int, placement: Placement) -> int:
        """Cost of the optimizer step of a parameter, by value index."""

    def transfer_quanta(self, value: int, placement: Placement, outward: bool) -> int:
        """Time for which one copy of a value to the host (``outward``) or back holds its link."""


def step_time(
    graph: OperatorGraph, schedule: Schedule, costs: StepCosts, local_bytes: LocalBytes
) -> tuple[StepTime | None, tuple[Violation, ...]]:
    """Simulate a correct schedule; None and violations where an instruction has no price.

    Parameters
    ----------
    graph, schedule
        The schedule to simulate, without other violations.
    costs
        Prices of instructions and copies.
    local_bytes
        Bytes of values on one device.
    """
    names = Wording(graph, schedule)
    quanta, unpriced = list[int](), list[Violation]()
    links, copies = bucketed_quanta(schedule, costs)
    for at, instruction in enumerate(schedule.instructions):
        try:
            quanta.append(links[at] if at in links else instruction_quanta(graph, schedule, costs, instruction))
        except KeyError:
            message = f"{names.instruction(instruction)} has no price under its placements"
            unpriced.append(Violation(ViolationKind.UNPRICED, at, message))
    if unpriced:
        return None, tuple(unpriced)
    return Streams(schedule, costs, local_bytes).run(quanta, copies), ()


def bucketed_quanta(schedule: Schedule, costs: StepCosts) -> tuple[dict[int, int], dict[int, int]]:
    """Time on the link by position of each part of a bucket; that of copies by position of first parts and waits."""
    links: dict[int, int] = {}
    copies: dict[int, int] = {}
    ends = waits(schedule.instructions)
    for bucket, parts in buckets(schedule.instructions).items():
        found = costs.bucket_quanta([(schedule.buffers[part.source].value, part.path) for part in parts])
        links.update(zip(bucket, found.links, strict=True))
        copies[bucket.start], copies[ends[bucket.start]] = found.packed, found.unpacked
    return links, copies


def instruction_quanta(graph: OperatorGraph, schedule: Schedule, costs: StepCosts, instruction: Instruction) -> int:
    """Cost of an instruction by itself: of the computation, or of the copy or collective that it starts.

    Raises
    ------
    KeyError
        It has no price.
    """
    match instruction:
        case Compute(operator) if not graph.operators[operator].is_view:
            return costs.compute_quanta(operator, *strategy_of(schedule, instruction))
        case Reshard(source, _, path, in_place=in_place):
            return costs.reshard_quanta(schedule.buffers[source].value, path, in_place)
        case Update(parameter):
            buffer = schedule.buffers[parameter]
            return costs.update_quanta(buffer.value, buffer.placement)
        case Offload(source) | Prefetch(source):
            buffer = schedule.buffers[source]
            return costs.transfer_quanta(buffer.value, buffer.placement, isinstance(instruction, Offload))
    return 0
