"""Placements: how a tensor lies on the axes of a device mesh.

A placement has one entry per mesh axis, its *axis placement*: ``"R"`` (replicate), ``"S0"``, ``"S1"``, ... (shard of
that dimension, contiguous, equal blocks) or ``"Psum"``, ``"Pavg"``, ``"Pmax"``, ``"Pmin"`` (partial: the value is the
reduction over the axis). Where two axes shard one dimension, the left axis is outer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

AxisPlacement = str
"""How a tensor lies on one mesh axis: ``"R"``, ``"S0"``, ``"Psum"``, ..."""

Placement = tuple[AxisPlacement, ...]
"""One axis placement per mesh axis."""

REPLICATE: AxisPlacement = "R"


def shard(dim: int) -> AxisPlacement:
    """Axis placement that shards dimension ``dim``."""
    return f"S{dim}"


def is_shard(axis_placement: AxisPlacement) -> bool:
    """Whether a dimension is sharded on the axis."""
    return axis_placement[0] == "S"


def is_partial(axis_placement: AxisPlacement) -> bool:
    """Whether a reduction over the axis is pending."""
    return axis_placement[0] == "P"


def placement_kind(placement: Placement) -> str:
    """``partial`` or ``sharded`` where an axis is, else ``replicated``."""
    if any(map(is_partial, placement)):
        return "partial"
    return "sharded" if any(map(is_shard, placement)) else "replicated"


def shard_dim(axis_placement: AxisPlacement) -> int:
    """Dimension that a shard splits."""
    return int(axis_placement[1:])


def replicated(ndim_mesh: int) -> Placement:
    """Replicated on every one of ``ndim_mesh`` axes."""
    return (REPLICATE,) * ndim_mesh


def local_shape(shape: Sequence[int], placement: Placement, mesh: Sequence[int]) -> tuple[int, ...]:
    """Shape on one rank; every sharded dimension must divide (see :func:`divides`)."""
    sizes = list(shape)
    for entry, count in zip(placement, mesh, strict=True):
        if is_shard(entry):
            sizes[shard_dim(entry)] //= count
    return tuple(sizes)


def local_numel(shape: Sequence[int], placement: Placement, mesh: Sequence[int]) -> int:
    """Number of elements on one rank."""
    return prod(local_shape(shape, placement, mesh))


def divides(shape: Sequence[int], placement: Placement, mesh: Sequence[int]) -> bool:
    """Whether every sharded dimension exists and is divided by all axes that shard it together."""
    parts: dict[int, int] = {}
    for entry, count in zip(placement, mesh, strict=True):
        if is_shard(entry):
            dim = shard_dim(entry)
            if dim >= len(shape):
                return False
            parts[dim] = parts.get(dim, 1) * count
    return all(shape[dim] > 0 and shape[dim] % count == 0 for dim, count in parts.items())


def reordered(placement: Placement, order: Sequence[int]) -> Placement:
    """Placement of the same tensor with its dimensions permuted: dimension ``k`` becomes what was ``order[k]``.

    A shard of a dimension that the tensor does not have stays as it is.
    """
    place = {shard(dim): shard(position) for position, dim in enumerate(order)}
    return tuple(place.get(entry, entry) for entry in placement)


def restored(placement: Placement, order: Sequence[int]) -> Placement:
    """Undo :func:`reordered`."""
    return tuple(shard(order[shard_dim(entry)]) if is_shard(entry) else entry for entry in placement)


def is_outermost(entry: str, sizes: Sequence[int]) -> bool:
    """Whether a shard's dimension is behind dimensions of size one only; ``sizes`` are in the order of memory."""
    return all(size == 1 for size in sizes[: shard_dim(entry)])


def block_index(coordinate: Sequence[int], placement: Placement, mesh: Sequence[int], dim: int) -> int:
    """Index of the block of dimension ``dim`` that the rank at ``coordinate`` holds."""
    index = 0
    for position, entry, count in zip(coordinate, placement, mesh, strict=True):
        if is_shard(entry) and shard_dim(entry) == dim:
            index = index * count + position
    return index
