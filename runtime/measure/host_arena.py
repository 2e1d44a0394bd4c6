"""One block of pinned host memory for all offloaded tensors of a step, with a planned place for each.

Torch's allocator of pinned memory rounds each tensor up to a power of two, and would round one block of all up as well:
up to twice the bytes of the plan. Here the places follow from the lifetimes in the schedule, and the block is
registered with CUDA as it is. A place is used again only after the computation has waited for the copies from it, as
the schedule says.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.graph.operator_graph import OperatorGraph
from planner.graph.placement import local_numel
from planner.schedule.instructions import Free, Offload, Schedule

ALIGNMENT = 256
"""Bytes to which places are aligned."""


@dataclass(frozen=True, slots=True)
class HostLifetime:
    """A host buffer: its bytes, the instruction that fills it, and the one that frees it."""

    buffer: int
    nbytes: int
    begins: int
    ends: int

    def meets(self, other: HostLifetime) -> bool:
        """Whether both are alive at once."""
        return self.begins < other.ends and other.begins < self.ends


@dataclass(frozen=True)
class ArenaPlan:
    """Bytes of an arena, and the place of each host buffer in it, in bytes from its start."""

    nbytes: int
    places: Mapping[int, int]


def host_lifetimes(graph: OperatorGraph, schedule: Schedule) -> list[HostLifetime]:
    """Host buffers of a schedule, in the order in which they are filled."""
    instructions, found = schedule.instructions, []
    freed = {buffer: at for at, entry in enumerate(instructions) if isinstance(entry, Free) for buffer in entry.buffers}
    for at, entry in enumerate(instructions):
        if isinstance(entry, Offload):
            buffer = schedule.buffers[entry.target]
            spec = graph.values[buffer.value].spec
            nbytes = local_numel(spec.shape, buffer.placement, schedule.mesh) * spec.item_bytes
            found.append(HostLifetime(entry.target, nbytes, at, freed.get(entry.target, len(instructions))))
    return found


def plan_arena(lifetimes: Sequence[HostLifetime]) -> ArenaPlan:
    """The smallest arena of three orders in which each buffer takes the lowest free place.

    Where lifetimes are nested, as those of activations are, the longest first give no gaps.
    """
    orders: tuple[Callable[[HostLifetime], tuple[int, ...]], ...] = (
        lambda entry: (entry.begins - entry.ends, -entry.nbytes),
        lambda entry: (-entry.nbytes, entry.begins),
        lambda entry: (entry.begins,),
    )
    return min((_placed(sorted(lifetimes, key=order)) for order in orders), key=lambda plan: plan.nbytes)


def _placed(lifetimes: Sequence[HostLifetime]) -> ArenaPlan:
    places: dict[int, int] = {}
    placed: list[HostLifetime] = []
    end = 0
    for entry in lifetimes:
        place = 0
        for other in sorted((each for each in placed if each.meets(entry)), key=lambda each: places[each.buffer]):
            if place + entry.nbytes <= places[other.buffer]:
                break
            place = max(place, places[other.buffer] + _aligned(other.nbytes))
        places[entry.buffer] = place
        placed.append(entry)
        end = max(end, place + _aligned(entry.nbytes))
    return ArenaPlan(end, places)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class HostArena:
    """A block of host memory, and tensors in it.

    Parameters
    ----------
    plan
        Its places.
    pinned
        Whether it is registered with CUDA, for copies beside the computation.

    Raises
    ------
    RuntimeError
        CUDA does not register it.
    """

    def __init__(self, plan: ArenaPlan, pinned: bool) -> None:
        self._places = plan.places
        self._block = torch.empty(plan.nbytes, dtype=torch.uint8)
        if pinned and plan.nbytes:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            pointer = self._block.data_ptr()
            torch.cuda.check_error(int(runtime.cudaHostRegister(pointer, plan.nbytes, 0)))
            weakref.finalize(self, runtime.cudaHostUnregister, pointer)

    def tensor(self, buffer: int, like: Tensor) -> Tensor:
        """The tensor of a host buffer, with the shape, dtype and order in memory of one on the device."""
        block = self._block.narrow(0, self._places[buffer], like.numel() * like.element_size()).view(like.dtype)
        reach = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
        return block.as_strided(like.shape, like.stride()) if reach == like.numel() else block.view(like.shape)
