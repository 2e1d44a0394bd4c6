"""The collectives that bring a local tensor from one placement to another, one mesh axis at a time.

Each step of a path of :mod:`planner.machine.resharding` is built here with the collective, the copies and the
lifetimes of that module's table. Torch's functional collectives are used (traceable; out of place, but for an
all-reduce of what an earlier step of the path made) and waited for at once.

A tensor whose dimensions lie in another order in memory (a transposed view) is handled in that order, so
its dimension 0 of the table is the outermost one in memory, and its result lies in the same order: a view
that needed no copy before needs none after. Results are dense and never alias their source. Where all
dimensions outside the one that is gathered, split or scattered have size one, the copy that the table
counts is not needed and not made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from planner.graph.placement import REPLICATE, Placement, is_partial, is_shard, shard_dim

LocalFunction = Callable[[Tensor], Tensor]

_Step = Callable[["MeshGroups", int, Tensor, int, int], Tensor]
"""Of groups, mesh axis, tensor, and the dimensions that the axis shards before and after (0 where none)."""


class ReshardStepError(ValueError):
    """A step of a resharding path that is not one collective."""


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """Process groups of a mesh that this rank is in, one per axis.

    Parameters
    ----------
    shape
        Size of each axis.
    coordinate
        Position of this rank on each axis.
    names
        Name of this rank's process group on each axis.
    """

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshGroups:
        """Groups of ``mesh``; this rank must lie on it.

        Raises
        ------
        ReshardStepError
            If this rank is not part of the mesh.
        """
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ReshardStepError(f"this rank is not on the mesh {tuple(mesh.shape)}: start one rank per position")
        names = tuple(str(mesh.get_group(axis).group_name) for axis in range(mesh.ndim))
        return cls(tuple(mesh.shape), tuple(coordinate), names)

    def all_reduce(self, tensor: Tensor, op: str, axis: int, *, in_place: bool = False) -> Tensor:
        """Reduction (``"sum"``, ``"avg"``, ``"max"``, ``"min"``) over mesh axis ``axis``; a new tensor or the same."""
        functional = torch.ops._c10d_functional
        reduce = functional.all_reduce_ if in_place else functional.all_reduce
        reduced: Tensor = reduce(tensor, op, self.names[axis])
        waited: Tensor = functional.wait_tensor(reduced)
        return waited

    def gather_blocks(self, tensor: Tensor, axis: int) -> Tensor:
        """Concatenate the contiguous tensors of the ranks of ``axis`` along dimension 0."""
        functional = torch.ops._c10d_functional
        gathered = functional.all_gather_into_tensor(tensor, self.shape[axis], self.names[axis])
        waited: Tensor = functional.wait_tensor(gathered)
        return waited

    def reduce_blocks(self, tensor: Tensor, axis: int, reduction: str) -> Tensor:
        """Reduce a contiguous tensor over ``axis``; every rank gets its block of dimension 0."""
        functional = torch.ops._c10d_functional
        scattered = functional.reduce_scatter_tensor(tensor, reduction, self.shape[axis], self.names[axis])
        waited: Tensor = functional.wait_tensor(scattered)
        return waited

    def exchange_blocks(self, tensor: Tensor, axis: int) -> Tensor:
        """Send block ``k`` of dimension 0 of a contiguous tensor to rank ``k`` of ``axis``."""
        functional = torch.ops._c10d_functional
        split = [tensor.shape[0] // self.shape[axis]] * self.shape[axis]
        exchanged = functional.all_to_all_single(tensor, split, split, self.names[axis])
        waited: Tensor = functional.wait_tensor(exchanged)
        return waited


def changed_axis(before: Placement, after: Placement) -> int:
    """The one mesh axis whose axis placement differs.

    Raises
    ------
    ReshardStepError
        If the placements differ on no axis or on several.
    """
    axes = [axis for axis, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    if len(axes) != 1:
        raise ReshardStepError(f"{before} -> {after} changes {len(axes)} mesh axes: a step changes exactly one")
    return axes[0]


def _check_innermost(before: Placement, after: Placement, axis: int) -> None:
    """A shard can come or go only on the innermost axis that shards its dimension."""
    for entry in (before[axis], after[axis]):
        if is_shard(entry) and entry in before[axis + 1 :]:
            raise ReshardStepError(
                f"{before} -> {after}: mesh axis {axis} is not the innermost that shards dimension "
                f"{shard_dim(entry)}, so this is no single collective; change the inner axis first"
            )


def _split_to_front(tensor: Tensor, dim: int, count: int) -> Tensor:
    """Contiguous ``[count * d0, d1, ...]`` whose block ``k`` of dimension 0 is block ``k`` of ``dim``."""
    if dim == 0:
        return tensor.contiguous()
    return _split_dim(tensor, dim, count).movedim(dim, 0).contiguous().flatten(0, 1)


def _join_from_front(tensor: Tensor, dim: int, count: int, shape: Sequence[int]) -> Tensor:
    """Undo :func:`_split_to_front`: contiguous tensor of ``shape``, copied only where it must be."""
    if dim == 0:
        return tensor
    return _split_dim(tensor, 0, count).movedim(0, dim).reshape(tuple(shape)).contiguous()


def _split_dim(tensor: Tensor, dim: int, count: int) -> Tensor:
    """View with ``dim`` split into ``count`` blocks."""
    shape = tensor.shape
    return tensor.view(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])


def reshard_step(before: Placement, after: Placement, groups: MeshGroups, *, owned: bool = False) -> LocalFunction:
    """Build the function of a local tensor that takes it from ``before`` to ``after``.

    Parameters
    ----------
    before, after
        Placements that differ on exactly one axis.
    groups
        Process groups of the mesh.
    owned
        Whether the tensor is the path's own, made by a step before this one, and may be changed.

    Returns
    -------
    Callable
        From the local tensor under ``before`` to one under ``after``, a new one unless the tensor is owned. A
        collective: every rank of the mesh must call it.

    Raises
    ------
    ReshardStepError
        If the change is not one collective or a local slice.
    """
    axis = changed_axis(before, after)
    _check_innermost(before, after, axis)
    old, new = before[axis], after[axis]
    dims = tuple(shard_dim(entry) if is_shard(entry) else 0 for entry in (old, new))
    if old == REPLICATE and is_shard(new):
        return _in_memory_order(_slice, groups, axis, dims)
    if is_shard(old) and new == REPLICATE:
        return _in_memory_order(_all_gather, groups, axis, dims)
    if is_partial(old) and new == REPLICATE:
        return _in_memory_order(partial(_all_reduce, old[1:], owned), groups, axis, dims)
    if is_partial(old) and is_shard(new):
        return _in_memory_order(partial(_reduce_scatter, old[1:]), groups, axis, dims)
    if is_shard(old) and is_shard(new):
        return _in_memory_order(_all_to_all, groups, axis, dims)
    raise ReshardStepError(f"{before} -> {after}: no collective turns {old!r} into {new!r}")


def _in_memory_order(step: _Step, groups: MeshGroups, axis: int, dims: tuple[int, ...]) -> LocalFunction:
    """Run a step on the contiguous tensor behind a transposed one, and transpose its result alike."""
    old_dim, new_dim = dims

    def run(tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return step(groups, axis, tensor, old_dim, new_dim)
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
        place = [order.index(dim) for dim in range(tensor.ndim)]
        return step(groups, axis, tensor.permute(order), place[old_dim], place[new_dim]).permute(place)

    return run


def _slice(groups: MeshGroups, axis: int, tensor: Tensor, _: int, dim: int) -> Tensor:
    size = tensor.shape[dim] // groups.shape[axis]
    block = tensor.narrow(dim, groups.coordinate[axis] * size, size)
    return block.clone(memory_format=torch.contiguous_format)


def _all_gather(groups: MeshGroups, axis: int, tensor: Tensor, dim: int, _: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] *= groups.shape[axis]
    gathered = groups.gather_blocks(tensor.contiguous(), axis)
    return _join_from_front(gathered, dim, groups.shape[axis], shape)


def _all_reduce(reduction: str, owned: bool, groups: MeshGroups, axis: int, tensor: Tensor, *_: int) -> Tensor:
    return groups.all_reduce(tensor, reduction, axis, in_place=owned)


def _reduce_scatter(reduction: str, groups: MeshGroups, axis: int, tensor: Tensor, _: int, dim: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] //= groups.shape[axis]
    return groups.reduce_blocks(_split_to_front(tensor, dim, groups.shape[axis]), axis, reduction).view(shape)


def _all_to_all(groups: MeshGroups, axis: int, tensor: Tensor, gathered_dim: int, split_dim: int) -> Tensor:
    count = groups.shape[axis]
    shape = list(tensor.shape)
    shape[split_dim] //= count
    shape[gathered_dim] *= count
    exchanged = groups.exchange_blocks(_split_to_front(tensor, split_dim, count), axis)
    return _join_from_front(exchanged, gathered_dim, count, shape)
