"""Placements: how a tensor lies on the axes of a device mesh.

A placement is one word per mesh axis: ``"R"`` (replicate), ``"S0"``, ``"S1"``, ... (shard of that
dimension, contiguous, equal blocks) or ``"Psum"``, ``"Pavg"``, ``"Pmax"``, ``"Pmin"`` (partial: the
value is the reduction over the axis). Where two axes shard one dimension, the left axis is outer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Placement = tuple[str, ...]
"""One word per mesh axis."""

REPLICATE = "R"


def shard(dim: int) -> str:
    """Word for a shard of dimension ``dim``."""
    return f"S{dim}"


def is_shard(word: str) -> bool:
    """Whether a word shards a dimension."""
    return word[0] == "S"


def is_partial(word: str) -> bool:
    """Whether a word is a pending reduction."""
    return word[0] == "P"


def shard_dim(word: str) -> int:
    """Dimension that a shard word shards."""
    return int(word[1:])


def replicated(ndim_mesh: int) -> Placement:
    """Replicated on every one of ``ndim_mesh`` axes."""
    return (REPLICATE,) * ndim_mesh


def local_shape(shape: Sequence[int], placement: Placement, mesh: Sequence[int]) -> tuple[int, ...]:
    """Shape on one rank; every sharded dimension must divide (see :func:`divides`)."""
    sizes = list(shape)
    for word, count in zip(placement, mesh, strict=True):
        if is_shard(word):
            sizes[shard_dim(word)] //= count
    return tuple(sizes)


def local_numel(shape: Sequence[int], placement: Placement, mesh: Sequence[int]) -> int:
    """Number of elements on one rank."""
    return prod(local_shape(shape, placement, mesh))


def divides(shape: Sequence[int], placement: Placement, mesh: Sequence[int]) -> bool:
    """Whether every sharded dimension exists and is divided by all axes that shard it together."""
    parts: dict[int, int] = {}
    for word, count in zip(placement, mesh, strict=True):
        if is_shard(word):
            dim = shard_dim(word)
            if dim >= len(shape):
                return False
            parts[dim] = parts.get(dim, 1) * count
    return all(shape[dim] > 0 and shape[dim] % count == 0 for dim, count in parts.items())


def reordered(placement: Placement, order: Sequence[int]) -> Placement:
    """Placement of the same tensor with its dimensions permuted: dimension ``k`` becomes what was ``order[k]``.

    A word for a dimension that the tensor does not have stays as it is.
    """
    place = {shard(dim): shard(position) for position, dim in enumerate(order)}
    return tuple(place.get(word, word) for word in placement)


def restored(placement: Placement, order: Sequence[int]) -> Placement:
    """Undo :func:`reordered`."""
    return tuple(shard(order[shard_dim(word)]) if is_shard(word) else word for word in placement)


def block_index(coordinate: Sequence[int], placement: Placement, mesh: Sequence[int], dim: int) -> int:
    """Index of the block of dimension ``dim`` that the rank at ``coordinate`` holds."""
    index = 0
    for position, word, count in zip(coordinate, placement, mesh, strict=True):
        if is_shard(word) and shard_dim(word) == dim:
            index = index * count + position
    return index
