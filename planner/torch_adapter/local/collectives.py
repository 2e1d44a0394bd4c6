"""The collectives that bring a local tensor from one placement to another, one mesh axis at a time.

Each step of a path of :mod:`planner.machine.resharding` is built here with the collective, the copies and the
lifetimes of that module's table. Torch's functional collectives are used (traceable; out of place, but for an
all-reduce of what an earlier step of the path made). They are waited for at once, or started and waited for later
(:func:`start_step`), in process groups of their own.

A tensor whose dimensions lie in another order in memory (a transposed view) is handled in that order, so
its dimension 0 of the table is the outermost one in memory, and its result lies in the same order: a view
that needed no copy before needs none after. Results are dense and never alias their source. Where all
dimensions outside the one that is gathered, split or scattered have size one, the copy that the table
counts is not needed and not made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from planner.graph.placement import REPLICATE, Placement, is_partial, is_shard, shard_dim

LocalFunction = Callable[[Tensor], Tensor]

_Start = Callable[["MeshGroups", int, Tensor, int, int], "InFlight"]
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
    overlapped
        The same of the groups for collectives that run beside the computation; empty if there are none.
    """

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    names: tuple[str, ...]
    overlapped: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: DeviceMesh, *, overlapping: bool = False) -> MeshGroups:
        """Groups of ``mesh``; this rank must lie on it, and all ranks of the job must call it.

        Parameters
        ----------
        mesh
            The mesh.
        overlapping
            Whether to make groups for collectives that run beside the computation.

        Raises
        ------
        ReshardStepError
            If this rank is not part of the mesh.
        """
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ReshardStepError(f"this rank is not on the mesh {tuple(mesh.shape)}: start one rank per position")
        names = tuple(str(mesh.get_group(axis).group_name) for axis in range(mesh.ndim))
        overlapped = tuple(_new_group(mesh, axis) for axis in range(mesh.ndim)) if overlapping else ()
        return cls(tuple(mesh.shape), tuple(coordinate), names, overlapped)

    def along(self, axis: int) -> MeshGroups:
        """The groups of one axis, as those of a mesh of this axis alone."""
        overlapped = self.overlapped[axis : axis + 1]
        return MeshGroups(
            self.shape[axis : axis + 1], self.coordinate[axis : axis + 1], self.names[axis : axis + 1], overlapped
        )

    def beside(self) -> MeshGroups:
        """The groups with those for collectives that run beside the computation in place of the others.

        Raises
        ------
        ReshardStepError
            There are none.
        """
        if len(self.overlapped) != len(self.shape):
            raise ReshardStepError("these groups cannot overlap collectives: make them with `overlapping`")
        return replace(self, names=self.overlapped)

    def all_reduce(self, tensor: Tensor, op: str, axis: int, *, in_place: bool = False) -> Tensor:
        """Reduction (``"sum"``, ``"avg"``, ``"max"``, ``"min"``) over mesh axis ``axis``; a new tensor or the same."""
        return waited(self.reduced(tensor, op, axis, in_place=in_place))

    def reduced(self, tensor: Tensor, op: str, axis: int, *, in_place: bool) -> Tensor:
        """As :meth:`all_reduce`, but it is not waited for."""
        functional = torch.ops._c10d_functional
        reduce = functional.all_reduce_ if in_place else functional.all_reduce
        reduced: Tensor = reduce(tensor, op, self.names[axis])
        return reduced

    def gathered(self, tensor: Tensor, axis: int) -> Tensor:
        """Concatenate the contiguous tensors of the ranks of ``axis`` along dimension 0; not waited for."""
        functional = torch.ops._c10d_functional
        # The variant that allocates its result is a coalesced gather, which corrupts the heap over gloo where many are
        # under way (torch 2.13): half of the runs of ten seconds with 60 of them crashed.
        result = tensor.new_empty((self.shape[axis] * tensor.shape[0], *tensor.shape[1:]))
        sent, received = (torch.view_as_real(each) if each.is_complex() else each for each in (tensor, result))
        functional.all_gather_into_tensor_out(sent, self.shape[axis], self.names[axis], out=received)
        return result  # waiting is by storage

    def scattered(self, tensor: Tensor, axis: int, reduction: str) -> Tensor:
        """Reduce a contiguous tensor over ``axis``; every rank gets its block of dimension 0. It is not waited for."""
        functional = torch.ops._c10d_functional
        scattered: Tensor = functional.reduce_scatter_tensor(tensor, reduction, self.shape[axis], self.names[axis])
        return scattered

    def exchanged(self, tensor: Tensor, axis: int) -> Tensor:
        """Send block ``k`` of dimension 0 of a contiguous tensor to rank ``k`` of ``axis``; not waited for."""
        split = [tensor.shape[0] // self.shape[axis]] * self.shape[axis]
        received: Tensor = torch.ops._c10d_functional.all_to_all_single(tensor, split, split, self.names[axis])
        return received


@dataclass(frozen=True, slots=True)
class InFlight:
    """A collective that was started.

    Parameters
    ----------
    result
        Its result, once it is done.
    finish
        From the result to the tensor under the new placement.
    """

    result: Tensor
    finish: LocalFunction

    def wait(self) -> Tensor:
        """Wait for it; the tensor under the new placement."""
        return self.finish(waited(self.result))


def waited(tensor: Tensor) -> Tensor:
    """The result of a collective, once it is done."""
    done: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return done


def _new_group(mesh: DeviceMesh, axis: int) -> str:
    """Name of a new process group of this rank along an axis."""
    rows = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
    group, _ = dist.new_subgroups_by_enumeration(rows)  # type: ignore[no-untyped-call]
    return str(group.group_name)


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


def check_innermost(before: Placement, after: Placement, axis: int) -> None:
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
    return split_dim(tensor, dim, count).movedim(dim, 0).contiguous().flatten(0, 1)


def _join_from_front(tensor: Tensor, dim: int, count: int, shape: Sequence[int]) -> Tensor:
    """Undo :func:`_split_to_front`: contiguous tensor of ``shape``, copied only where it must be."""
    if dim == 0:
        return tensor
    return split_dim(tensor, 0, count).movedim(0, dim).reshape(tuple(shape)).contiguous()


def split_dim(tensor: Tensor, dim: int, count: int) -> Tensor:
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
        Whether the tensor may be changed, since nothing else reads it.

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
    if before[axis] == REPLICATE and is_shard(after[axis]):
        check_innermost(before, after, axis)
        return partial(_slice, groups, axis, shard_dim(after[axis]))
    start = start_step(before, after, groups, owned=owned)
    return lambda tensor: start(tensor).wait()


def start_step(
    before: Placement, after: Placement, groups: MeshGroups, *, owned: bool = False
) -> Callable[[Tensor], InFlight]:
    """As :func:`reshard_step`, for a collective that is not waited for.

    What its wait makes of the result (a concatenation along a later dimension) is made there.
    """
    axis = changed_axis(before, after)
    check_innermost(before, after, axis)
    old, new = before[axis], after[axis]
    dims = tuple(shard_dim(entry) if is_shard(entry) else 0 for entry in (old, new))
    if is_shard(old) and new == REPLICATE:
        return _in_memory_order(_all_gather, groups, axis, dims)
    if is_partial(old) and new == REPLICATE:
        return _in_memory_order(partial(_all_reduce, old[1:], owned), groups, axis, dims)
    if is_partial(old) and is_shard(new):
        return _in_memory_order(partial(_reduce_scatter, old[1:]), groups, axis, dims)
    if is_shard(old) and is_shard(new):
        return _in_memory_order(_all_to_all, groups, axis, dims)
    raise ReshardStepError(f"{before} -> {after}: no collective turns {old!r} into {new!r}")


def _in_memory_order(
    step: _Start, groups: MeshGroups, axis: int, dims: tuple[int, ...]
) -> Callable[[Tensor], InFlight]:
    """Run a step on the contiguous tensor behind a transposed one, and transpose its result alike."""
    old_dim, new_dim = dims

    def run(tensor: Tensor) -> InFlight:
        if tensor.is_contiguous():
            return step(groups, axis, tensor, old_dim, new_dim)
        order, place = memory_order(tensor)
        started = step(groups, axis, tensor.permute(order), place[old_dim], place[new_dim])
        finish = started.finish
        return replace(started, finish=lambda result: finish(result).permute(place))

    return run


def memory_order(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Dimensions from the outermost in memory, and where each of them is among these."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return order, [order.index(dim) for dim in range(tensor.ndim)]


def _slice(groups: MeshGroups, axis: int, dim: int, tensor: Tensor) -> Tensor:
    size = tensor.shape[dim] // groups.shape[axis]
    block = tensor.narrow(dim, groups.coordinate[axis] * size, size)
    if tensor.is_contiguous():
        return block.clone(memory_format=torch.contiguous_format)
    order, place = memory_order(tensor)
    return block.permute(order).clone(memory_format=torch.contiguous_format).permute(place)


def _all_gather(groups: MeshGroups, axis: int, tensor: Tensor, dim: int, _: int) -> InFlight:
    shape = list(tensor.shape)
    shape[dim] *= groups.shape[axis]
    gathered = groups.gathered(tensor.contiguous(), axis)
    return InFlight(gathered, lambda result: _join_from_front(result, dim, groups.shape[axis], shape))


def _all_reduce(reduction: str, owned: bool, groups: MeshGroups, axis: int, tensor: Tensor, *_: int) -> InFlight:
    return InFlight(groups.reduced(tensor, reduction, axis, in_place=owned), lambda result: result)


def _reduce_scatter(reduction: str, groups: MeshGroups, axis: int, tensor: Tensor, _: int, dim: int) -> InFlight:
    shape = list(tensor.shape)
    shape[dim] //= groups.shape[axis]
    scattered = groups.scattered(_split_to_front(tensor, dim, groups.shape[axis]), axis, reduction)
    return InFlight(scattered, lambda result: result.view(shape))


def _all_to_all(groups: MeshGroups, axis: int, tensor: Tensor, gathered_dim: int, split_dim: int) -> InFlight:
    count = groups.shape[axis]
    shape = list(tensor.shape)
    shape[split_dim] //= count
    shape[gathered_dim] *= count
    exchanged = groups.exchanged(_split_to_front(tensor, split_dim, count), axis)
    return InFlight(exchanged, lambda result: _join_from_front(result, gathered_dim, count, shape))
