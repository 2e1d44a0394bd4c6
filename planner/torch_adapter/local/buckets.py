"""Buckets: one collective for several local tensors, through flat buffers.

All tensors are copied into the flat buffer that is sent, in the order in which their dimensions lie in memory, and the
first wait copies all results out of that which is received. A flat buffer has a row per rank where the ranks' blocks
differ: of what is gathered, or of what is scattered. An all-reduce is done in place. A result is dense, lies in memory
as its source does, and shares no memory with the flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from planner.graph.placement import REPLICATE, Placement, is_partial, is_shard, shard_dim
from planner.torch_adapter.local.collectives import (
    MeshGroups,
    ReshardStepError,
    changed_axis,
    check_innermost,
    memory_order,
    split_dim,
    waited,
)


def start_bucket(
    paths: Sequence[tuple[Placement, Placement]], groups: MeshGroups
) -> Callable[..., tuple[PartInFlight, ...]]:
    """Build the function of local tensors that starts one collective for all, and returns what to wait for for each.

    Parameters
    ----------
    paths
        Placements of each tensor before and after; all gather or reduce alike, on one mesh axis.
    groups
        Process groups of the mesh.

    Raises
    ------
    ReshardStepError
        They are not parts of one gather or reduction.
    """
    changes = {_change(*path) for path in paths}
    if len(changes) != 1:
        raise ReshardStepError(f"{sorted(changes)}: a bucket gathers or reduces alike, on one mesh axis")
    ((axis, old, new),) = changes
    if (old, new) != ("S", REPLICATE) and not (is_partial(old) and new in ("S", REPLICATE)):
        raise ReshardStepError(f"no bucket turns {old!r} into {new!r}")
    for path in paths:
        check_innermost(*path, axis)
    dims = [next((shard_dim(at[axis]) for at in path if is_shard(at[axis])), 0) for path in paths]
    return partial(_start, groups, axis, (old, new), dims)


def _change(before: Placement, after: Placement) -> tuple[int, str, str]:
    """Mesh axis of a step, and what its placement is before and after, without dimensions."""
    axis = changed_axis(before, after)
    old, new = ("S" if is_shard(entry) else entry for entry in (before[axis], after[axis]))
    return axis, old, new


@dataclass(frozen=True, slots=True)
class _Part:
    """How a tensor lies in flat buffers.

    Parameters
    ----------
    dim
        The dimension that is gathered or scattered, counted from the outermost in memory.
    order, place
        Dimensions from the outermost to the innermost in memory, and where each is among these.
    received
        Shape of a block of the result, in the order of memory.
    """

    dim: int
    order: tuple[int, ...]
    place: tuple[int, ...]
    received: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, dim: int, parts: int) -> _Part:
        """The part of a tensor, whose blocks along a dimension go to so many ranks."""
        order, place = memory_order(tensor)
        shape = [tensor.shape[dim] for dim in order]
        inner = place[dim] if place else 0
        if parts > 1:
            shape[inner] //= parts
        return cls(inner, tuple(order), tuple(place), tuple(shape))

    def packed(self, tensor: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Where a tensor goes in its column of the buffer that is sent, ``(rows, elements)``, and the tensor alike."""
        rows, lying = column.shape[0], tensor.permute(self.order)
        blocks = lying.unsqueeze(0) if rows == 1 else split_dim(lying, self.dim, rows).movedim(self.dim, 0)
        return column.view(blocks.shape), blocks

    def unpacked(self, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The new result of a column of the buffer that was received, its blocks, and those of the column alike."""
        rows, shape = column.shape[0], list(self.received)
        blocks = column.view(rows, *shape)
        if rows > 1:
            shape[self.dim] *= rows
        result = column.new_empty(shape)
        if rows == 1:
            return result.permute(self.place), result, blocks[0]
        return result.permute(self.place), split_dim(result, self.dim, rows), blocks.movedim(0, self.dim)


class _Arrival:
    """The results of a bucket under way."""

    def __init__(self, flat: Tensor, parts: Sequence[_Part], rows: int, numels: Sequence[int]) -> None:
        self._flat: Tensor | None = flat
        self._parts, self._rows, self._numels = parts, rows, list(numels)
        self._results: dict[int, Tensor] = {}

    def take(self, at: int) -> Tensor:
        """Take the result of a part, once; the first call waits for the collective and copies all of them."""
        if self._flat is not None:
            columns = waited(self._flat).view(self._rows, -1).split_with_sizes(self._numels, dim=1)
            found = [part.unpacked(column) for part, column in zip(self._parts, columns, strict=True)]
            torch._foreach_copy_([blocks for _, blocks, _ in found], [blocks for _, _, blocks in found])
            self._results = {at: result for at, (result, _, _) in enumerate(found)}
            self._flat = None
        return self._results.pop(at)


@dataclass(frozen=True, slots=True)
class PartInFlight:
    """A part of a bucket that was started."""

    arrival: _Arrival
    part: int

    def wait(self) -> Tensor:
        """Wait for the bucket; the tensor under the new placement."""
        return self.arrival.take(self.part)


def _start(
    groups: MeshGroups, axis: int, change: tuple[str, str], dims: Sequence[int], *tensors: Tensor
) -> tuple[PartInFlight, ...]:
    (old, new), count = change, groups.shape[axis]
    sent, received = (count if kind == "S" else 1 for kind in (new, old))
    parts = [_Part.of(tensor, dim, sent) for tensor, dim in zip(tensors, dims, strict=True)]
    numels = [tensor.numel() // sent for tensor in tensors]
    flat = tensors[0].new_empty(sent * sum(numels))
    columns = flat.view(sent, -1).split_with_sizes(numels, dim=1)
    pairs = [part.packed(tensor, column) for part, tensor, column in zip(parts, tensors, columns, strict=True)]
    torch._foreach_copy_([blocks for blocks, _ in pairs], [blocks for _, blocks in pairs])
    if old == "S":
        result = groups.gathered(flat, axis)
    elif new == "S":
        result = groups.scattered(flat, axis, old[1:])
    else:
        result = groups.reduced(flat, old[1:], axis, in_place=True)
    arrival = _Arrival(result, parts, received, numels)
    return tuple(PartInFlight(arrival, at) for at in range(len(parts)))
