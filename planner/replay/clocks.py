"""Predicted time of a replayed schedule: three clocks in whole quanta of time.

Compute runs the instructions in order, the outward and the inward link run copies beside it; the rules are
those of :mod:`planner.schedule.instructions`. A step ends when its last instruction does, so its time is the sum of the
instructions' own costs and of the stalls of the compute clock for copies. Without copies it is the plain sum.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from planner.graph.operator_graph import OperatorGraph
from planner.graph.placement import Placement
from planner.machine.cluster import HostCopies
from planner.replay.memory import LocalBytes
from planner.replay.report import Violation, ViolationKind
from planner.replay.structure import strategy_of
from planner.replay.wording import Wording
from planner.schedule.instructions import (
    Compute,
    Free,
    Instruction,
    Offload,
    Prefetch,
    Reshard,
    Schedule,
    Update,
    reads,
)


class StepCosts(Protocol):
    """Costs in an integer quantum of time; views cost nothing and are never queried.

    Each method raises KeyError for an instruction without a price. Host copies are queried only for a schedule
    that has some.
    """

    @property
    def host_copies(self) -> HostCopies:
        """Concurrency of copies between device and host."""

    def compute_quanta(
        self, operator: int, outputs: tuple[Placement | None, ...], inputs: tuple[Placement, ...]
    ) -> int:
        """Cost of one execution of an operator under these placements."""

    def reshard_quanta(self, value: int, path: tuple[Placement, ...]) -> int:
        """Cost of a resharding path of a value."""

    def update_quanta(self, parameter: int, placement: Placement) -> int:
        """Cost of the optimizer step of a parameter, by value index."""

    def transfer_quanta(self, value: int, placement: Placement, outward: bool) -> int:
        """Time for which one copy of a value to the host (``outward``) or back holds its link."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one step on a device.

    Parameters
    ----------
    total
        Quanta from the first instruction to the end of the last.
    stalled
        Quanta of these in which the compute clock was stalled by copies.
    hidden_bytes
        Bytes of the copies, both ways, that caused no stall.
    """

    total: int
    stalled: int
    hidden_bytes: int


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
    quanta, unpriced = [], []
    for at, instruction in enumerate(schedule.instructions):
        try:
            quanta.append(instruction_quanta(graph, schedule, costs, instruction))
        except KeyError:
            message = f"{names.instruction(instruction)} has no price under its placements"
            unpriced.append(Violation(ViolationKind.UNPRICED, at, message))
    if unpriced:
        return None, tuple(unpriced)
    return _Clocks(schedule, costs, local_bytes).run(quanta), ()


def instruction_quanta(graph: OperatorGraph, schedule: Schedule, costs: StepCosts, instruction: Instruction) -> int:
    """Cost of an instruction by itself: of the computation, or of the copy that it starts.

    Raises
    ------
    KeyError
        It has no price.
    """
    match instruction:
        case Compute(operator) if not graph.operators[operator].is_view:
            return costs.compute_quanta(operator, *strategy_of(schedule, instruction))
        case Reshard(source, _, path):
            return costs.reshard_quanta(schedule.buffers[source].value, path)
        case Update(parameter):
            buffer = schedule.buffers[parameter]
            return costs.update_quanta(buffer.value, buffer.placement)
        case Offload(source) | Prefetch(source):
            buffer = schedule.buffers[source]
            return costs.transfer_quanta(buffer.value, buffer.placement, isinstance(instruction, Offload))
    return 0


@dataclass(slots=True)
class _Copy:
    """A copy between device and host: its end, its bytes, and whether it caused a stall."""

    ends: int
    nbytes: int
    exposed: bool


class _Clocks:
    """The compute clock and those of the links, by whether they lead outward."""

    def __init__(self, schedule: Schedule, costs: StepCosts, local_bytes: LocalBytes) -> None:
        self._schedule = schedule
        self._costs = costs
        self._local_bytes = local_bytes
        self._compute = 0
        self._stalled = 0
        self._link = {True: 0, False: 0}
        self._copies: list[_Copy] = []
        self._using: dict[int, list[_Copy]] = defaultdict(list)
        """Copies that read or write a buffer."""
        self._filling: dict[int, _Copy] = {}
        """The copy that writes a buffer."""

    def run(self, quanta: list[int]) -> StepTime:
        """Run the instructions, whose own costs are ``quanta``."""
        for instruction, cost in zip(self._schedule.instructions, quanta, strict=True):
            match instruction:
                case Offload(source, target) | Prefetch(source, target):
                    self._copy(source, target, cost, outward=isinstance(instruction, Offload))
                case Free(buffers):
                    for buffer in buffers:
                        for copy in self._using.pop(buffer, ()):
                            self._wait_for(copy)
                case _:
                    for buffer in reads(instruction):
                        if buffer in self._filling:
                            self._wait_for(self._filling[buffer])
                    self._compute += cost
        hidden = sum(copy.nbytes for copy in self._copies if not copy.exposed)
        return StepTime(self._compute, self._stalled, hidden)

    def _copy(self, source: int, target: int, cost: int, outward: bool) -> None:
        way = self._costs.host_copies
        link = outward or way is HostCopies.TAKE_TURNS
        starts = max(self._compute, self._link[link])
        if source in self._filling:
            starts = max(starts, self._filling[source].ends)
        entry = self._schedule.buffers[source]
        copy = _Copy(starts + cost, self._local_bytes(entry.value, entry.placement), exposed=False)
        self._link[link] = copy.ends
        self._copies.append(copy)
        self._using[source].append(copy)
        self._using[target].append(copy)
        self._filling[target] = copy
        if way is HostCopies.BLOCKING:
            self._wait_for(copy)

    def _wait_for(self, copy: _Copy) -> None:
        wait = copy.ends - self._compute
        if wait > 0:
            self._compute += wait
            self._stalled += wait
            copy.exposed = True
