"""Blocks of full tensors: which part of a tensor a rank holds under a placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from planner.graph.placement import Placement, block_index, is_partial, local_shape
from planner.torch_adapter.local.collectives import MeshGroups, reshard_step

Slices = tuple[slice, ...]
BlockReader = Callable[[str, Sequence[Slices]], Sequence[Tensor]]
"""Blocks of a tensor of the model by its name; all ranks call it for the same names in the same order."""


@dataclass(frozen=True, slots=True)
class Block:
    """Place of a rank's local tensor in one of the model's.

    Parameters
    ----------
    name, shape
        First name and shape of the model's tensor.
    offsets, sizes
        First index and length on each of its dimensions.
    transposed
        Whether the local tensor has rows and columns swapped.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    transposed: bool = False

    @property
    def slices(self) -> Slices:
        """The block as one slice per dimension."""
        return tuple(slice(first, first + size) for first, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def is_empty(self) -> bool:
        """Whether the block has no entries."""
        return 0 in self.sizes

    def of(self, local: Tensor) -> Tensor:
        """View of a local tensor that lies as in the model."""
        return local.t() if self.transposed and local.ndim > 1 else local


def local_tensor(tensor: Tensor) -> Tensor:
    """Part of a tensor that is on this device, without gradient."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def reader_of(tensors: Mapping[str, Tensor]) -> BlockReader:
    """Reader of tensors that this process has."""
    return lambda name, wanted: [tensors[name][slices] for slices in wanted]


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
