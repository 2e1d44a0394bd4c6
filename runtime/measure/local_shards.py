"""Blocks of full tensors: which part of a tensor a rank holds under a placement."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from planner.graph.placement import Placement, block_index, is_partial, local_shape
from planner.torch_adapter.local.collectives import MeshGroups, reshard_step


def block_slices(
    shape: Sequence[int], placement: Placement, mesh: Sequence[int], coordinate: Sequence[int]
) -> tuple[slice, ...]:
    """Block of a tensor of some ``shape`` that the rank at ``coordinate`` holds, as one slice per dimension."""
    sizes = local_shape(shape, placement, mesh)
    firsts = [block_index(coordinate, placement, mesh, dim) * size for dim, size in enumerate(sizes)]
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def local_block(full: Tensor, placement: Placement, mesh: Sequence[int], coordinate: Sequence[int]) -> Tensor:
    """View of the block of ``full`` that the rank at ``coordinate`` holds.

    Parameters
    ----------
    full
        The global tensor (a memory-mapped one stays on disk: only views are taken).
    placement
        One entry per mesh axis, none of them partial.
    mesh
        Size of each mesh axis.
    coordinate
        Position of the rank on each axis.

    Raises
    ------
    ValueError
        If the placement is partial: a single tensor does not say what each rank holds.
    """
    if any(is_partial(entry) for entry in placement):
        raise ValueError(f"placement {placement} is partial: a full tensor has no block under it")
    return full[block_slices(full.shape, placement, mesh, coordinate)]


def gather_full(local: Tensor, placement: Placement, groups: MeshGroups) -> Tensor:
    """Full tensor of which every rank of the mesh holds ``local``; a collective.

    Axes are gathered or reduced from the right, since the left one of two that shard a dimension is outer.
    """
    current = placement
    for axis in reversed(range(len(placement))):
        if current[axis] != "R":
            after = (*current[:axis], "R", *current[axis + 1 :])
            local = reshard_step(current, after, groups)(local)
            current = after
    return local
