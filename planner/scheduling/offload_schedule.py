"""Instructions of offloaded activations: offloads, prefetches, frees, and views taken again.

The times of the copies are chosen in :mod:`planner.scheduling.offload_timetable` and adapted to a memory limit in
:mod:`planner.scheduling.offload_limit`. Device memory is at every moment at most that of the schedule without
offload.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from planner.graph.operator_graph import OperatorGraph
from planner.replay.clocks import StepCosts
from planner.replay.memory import LocalBytes
from planner.schedule.instructions import (
    Compute,
    Free,
    Instruction,
    Offload,
    Prefetch,
    Reshard,
    Schedule,
    creates,
    host_buffers,
    reads,
)
from planner.schedule.storage_uses import StorageUses
from planner.scheduling.offload_limit import DeviceLimit, stays_below
from planner.scheduling.offload_timetable import Stay, Timetable


def with_offload(
    graph: OperatorGraph,
    schedule: Schedule,
    offloaded: Collection[int],
    costs: StepCosts,
    limit: DeviceLimit | None = None,
) -> Schedule:
    """The schedule with activations in host memory until their backward uses.

    Parameters
    ----------
    graph
        The traced step.
    schedule
        A correct schedule of it without offload.
    offloaded
        Value indices of the activations, each as its operator's first execution makes it.
    costs
        Prices of instructions and copies.
    limit
        Limit on device memory, kept at the price of stalls; None: no stall for a copy that can be hidden. Where these
        activations do not free enough memory, the schedule comes as close to the limit as they allow.

    Returns
    -------
    Schedule
        The same computation with the activations on the host between forward and backward.

    Raises
    ------
    ValueError
        The schedule offloads already, or a value cannot be offloaded (see :func:`offload_candidates`).
    """
    if host_buffers(schedule.instructions):
        raise ValueError("the schedule offloads already: decide on all activations at once")
    uses = StorageUses(graph, schedule)
    for value in offloaded:
        refusal = uses.refusal(value)
        if refusal:
            raise ValueError(f"cannot offload: {refusal}; offload_candidates lists what can be")
    owners = [owner for value in sorted(set(offloaded)) if (owner := uses.first_buffer(value)) is not None]
    stays = Timetable(graph, schedule, uses, costs).stays(owners)
    if limit is not None:
        stays = stays_below(limit, schedule, stays, LocalBytes(graph, schedule.mesh))
    return _Writer(schedule, uses, stays).write()


def offload_candidates(graph: OperatorGraph, schedule: Schedule) -> tuple[int, ...]:
    """Values that :func:`with_offload` accepts for a schedule without offload, in ascending order.

    Outputs of operators that own their storage, made in forward, used again in backward, no part of a result.
    """
    uses = StorageUses(graph, schedule)
    return tuple(value.index for value in graph.values if not uses.refusal(value.index))


class _Writer:
    """Builds the schedule with the stays inserted.

    Frees of an offloaded storage's buffers are placed anew: the owner at the position in its stay, its host buffer
    behind the first reader (which waits for the copy), all others behind their last use.
    """

    def __init__(self, schedule: Schedule, uses: StorageUses, stays: list[Stay]) -> None:
        self._schedule, self._uses, self._stays = schedule, uses, stays
        self._owners = {stay.owner for stay in stays}
        self._buffers = list(schedule.buffers)
        self._written: list[Instruction] = []
        self._host: dict[int, int] = {}
        self._back: dict[int, int] = {}
        """Buffer that stands in backward for one of an offloaded storage that forward made."""

    def write(self) -> Schedule:
        leaving, freed, returning, first_read = (defaultdict[int, list[int]](list) for _ in range(4))
        for stay in sorted(self._stays, key=lambda stay: stay.turn):
            leaving[stay.offloaded].append(stay.owner)
        for stay in self._stays:
            freed[stay.freed].append(stay.owner)
            returning[stay.prefetched].append(stay.owner)
            first_read[stay.read].append(stay.owner)
        for at, instruction in enumerate(self._schedule.instructions):
            for owner in leaving[at]:
                self._host[owner] = self._like(owner)
                self._written.append(Offload(owner, self._host[owner]))
            if freed[at]:
                self._written.append(Free(tuple(sorted(freed[at]))))
            for owner in returning[at]:
                self._back[owner] = self._like(owner)
                self._written.append(Prefetch(self._host[owner], self._back[owner]))
            self._write_again(at, instruction)
            if first_read[at]:
                self._written.append(Free(tuple(sorted(self._host[owner] for owner in first_read[at]))))
        return replace(self._schedule, buffers=tuple(self._buffers), instructions=self._with_frees())

    def _write_again(self, at: int, instruction: Instruction) -> None:
        """An instruction of the schedule that reads prefetched buffers in place of offloaded ones."""
        if isinstance(instruction, Free):
            kept = tuple(buffer for buffer in instruction.buffers if self._uses.root[buffer] not in self._owners)
            if kept:
                self._written.append(Free(kept))
            return
        if at >= self._uses.boundary and any(self._uses.root[buffer] in self._owners for buffer in reads(instruction)):
            instruction = self._reading_back(instruction)
        self._written.append(instruction)

    def _reading_back(self, instruction: Instruction) -> Instruction:
        match instruction:
            case Compute(inputs=inputs):
                return replace(instruction, inputs=tuple(self._current(buffer) for buffer in inputs))
            case Reshard(source):
                return replace(instruction, source=self._current(source))
        return instruction

    def _current(self, buffer: int) -> int:
        """Replacement of a buffer in backward; a view taken in forward is taken again at its first use."""
        forward = self._uses.creator[buffer] < self._uses.boundary
        if self._uses.root[buffer] not in self._owners or not forward:
            return buffer
        if buffer not in self._back:
            view = self._schedule.instructions[self._uses.creator[buffer]]
            assert isinstance(view, Compute), "only views alias what an operator made"
            inputs = (self._current(view.inputs[0]), *view.inputs[1:])
            self._back[buffer] = self._like(buffer)
            outputs = tuple(self._back[buffer] if output == buffer else None for output in view.outputs)
            self._written.append(replace(view, inputs=inputs, outputs=outputs))
        return self._back[buffer]

    def _like(self, buffer: int) -> int:
        """A new buffer of the same value and placement."""
        self._buffers.append(self._buffers[buffer])
        return len(self._buffers) - 1

    def _with_frees(self) -> tuple[Instruction, ...]:
        managed = {buffer for buffer, owner in enumerate(self._uses.root) if owner in self._owners and buffer != owner}
        managed.update(self._back.values())
        last: dict[int, int] = {}
        for at, instruction in enumerate(self._written):
            if not isinstance(instruction, Free):
                for buffer in managed.intersection((*reads(instruction), *creates(instruction))):
                    last[buffer] = at
        ending: dict[int, list[int]] = defaultdict(list)
        for buffer, at in last.items():
            ending[at].append(buffer)
        found: list[Instruction] = []
        for at, instruction in enumerate(self._written):
            found.append(instruction)
            if at in ending:
                found.append(Free(tuple(sorted(ending[at]))))
        return tuple(found)
