"""The devices of a layer plan: one mesh of prime axes per stage, and on the same devices a mesh per kind of layer.

Hidden states are placed on the stage's prime axes, so that DTensor can bring them from any layer's layout to any
other's. Parameters are placed on meshes (replicas, shards, tensor) of the same devices in the same order, as FSDP2 and
tensor parallelism require.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from planner.layers.plan.check import stage_axes
from planner.layers.plan.document import LayerPlan, LayerSettings
from runtime.job.layout import ranks_by_machine
from runtime.job.process_group import LaunchError

REPLICAS, SHARDS, TENSOR, PIPELINE = "replicas", "shards", "tensor", "pipeline"
_PURPOSES = {PIPELINE: "pipeline", REPLICAS: "parameters", SHARDS: "parameters"}
"""What axes communicate; others: activations. Calls of one group run one after another, and these should overlap."""

BATCH_DIMENSION, SEQUENCE_DIMENSION = 0, 1
"""Dimensions of hidden states that data and sequence parallelism shard."""

Layout = tuple[Placement, ...]
"""Placement of a tensor on each prime axis of the stage."""


@dataclass(frozen=True, eq=False)
class PlanMeshes:
    """Meshes of one rank.

    Parameters
    ----------
    stage
        Position of this rank's stage.
    sizes
        Devices of each stage.
    axes
        The stage's devices by prime axes.
    device_type
        ``cpu`` or ``cuda``.
    """

    stage: int
    sizes: tuple[int, ...]
    axes: DeviceMesh
    device_type: str

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.sizes)

    @property
    def is_even(self) -> bool:
        """Whether all stages have equally many devices."""
        return len(set(self.sizes)) == 1

    @property
    def rank_in_stage(self) -> int:
        """Place of this rank among its stage's devices."""
        return self.ranks_of(self.stage).index(dist.get_rank())

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Ranks of a stage, in the order of their places."""
        first = sum(self.sizes[:stage])
        return ranks_by_machine()[first : first + self.sizes[stage]]

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks at this rank's place in every stage."""
        shape = (self.stages, self.axes.size(), 1, 1)
        return _named_mesh(self.device_type, shape).get_group(PIPELINE)

    def parameters(self, layer: LayerSettings) -> DeviceMesh:
        """Mesh (replicas, shards) of a layer of this stage, as FSDP2 takes it."""
        return self._of(layer)[REPLICAS, SHARDS]

    def tensor(self, layer: LayerSettings) -> DeviceMesh:
        """Mesh of the devices that share a layer's products; of the same root mesh as :meth:`parameters`."""
        return self._of(layer)[TENSOR]

    def _of(self, layer: LayerSettings) -> DeviceMesh:
        if not self.is_even:
            ranks, names = self.ranks_of(self.stage), (REPLICAS, SHARDS, TENSOR)
            mesh = _mesh(self.device_type, ranks, _shape(layer), names)
            assert mesh is not None
            return mesh
        return _named_mesh(self.device_type, (self.stages, layer.replicas, layer.shards, layer.tensor_parallel))

    def batch_layout(self, layer: LayerSettings) -> Layout:
        """Layout of tensors that have a batch and whole sequences."""
        return self._layout(layer, Replicate())

    def hidden_layout(self, layer: LayerSettings) -> Layout:
        """Layout of the hidden states that a layer takes and hands over."""
        return self._layout(layer, Shard(SEQUENCE_DIMENSION) if layer.sequence_parallel else Replicate())

    def _layout(self, layer: LayerSettings, on_tensor_axes: Placement) -> Layout:
        sizes = self.axes.mesh.shape
        inside = [prod(sizes[axis:]) <= layer.tensor_parallel for axis in range(len(sizes))]
        return tuple(on_tensor_axes if tensor else Shard(BATCH_DIMENSION) for tensor in inside)


def plan_meshes(plan: LayerPlan, device_type: str) -> PlanMeshes:
    """Make the process groups of a plan; a collective of all ranks.

    There is one group for the same ranks and purpose in all meshes, those of later plans included.

    Raises
    ------
    LaunchError
        The job does not have the plan's ranks.
    """
    ranks = dist.get_world_size()
    if ranks != plan.devices:
        raise LaunchError(f"the plan is for {plan.devices} devices, the job has {ranks} ranks: start {plan.devices}")
    stages = len(plan.stages)
    if not plan.is_even:
        return _uneven_meshes(plan, device_type)
    # Every rank makes every mesh, in one order: making a group is a collective of all ranks.
    shapes = {(stages, plan.stage_sizes[0], 1, 1)}
    for layer in plan.layers:
        shapes.add((stages, layer.replicas, layer.shards, layer.tensor_parallel))
        shapes.add((stages, layer.data_parallel, 1, layer.tensor_parallel))
    for shape in sorted(shapes):
        _named_mesh(device_type, shape)
    sizes = stage_axes(plan.stage_sizes[0], plan.layers)
    names = (PIPELINE, *_axis_names(sizes))
    axes = _mesh(device_type, ranks_by_machine(), (stages, *sizes), names)
    assert axes is not None
    return PlanMeshes(axes.get_local_rank(PIPELINE), plan.stage_sizes, axes[names[1:]], device_type)


def _uneven_meshes(plan: LayerPlan, device_type: str) -> PlanMeshes:
    """Meshes of stages with different numbers of devices: every rank makes those of all stages, in one order."""
    ordered, first, mine = ranks_by_machine(), 0, None
    for number, (stage, size) in enumerate(zip(plan.stages, plan.stage_sizes, strict=True)):
        ranks = ordered[first : first + size]
        first += size
        for shape in sorted({_shape(layer) for layer in stage.layers} | {_whole(layer) for layer in stage.layers}):
            _mesh(device_type, ranks, shape, (REPLICAS, SHARDS, TENSOR))
        sizes = stage_axes(size, stage.layers)
        axes = _mesh(device_type, ranks, sizes, _axis_names(sizes))
        if axes is not None:
            mine = PlanMeshes(number, plan.stage_sizes, axes, device_type)
    assert mine is not None, "the stages have all ranks"
    return mine


def _axis_names(sizes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"axis{position}" for position in range(len(sizes)))


def _shape(layer: LayerSettings) -> tuple[int, int, int]:
    return layer.replicas, layer.shards, layer.tensor_parallel


def _whole(layer: LayerSettings) -> tuple[int, int, int]:
    return layer.data_parallel, 1, layer.tensor_parallel  # of slices that are not sharded


def reshard(tensor: Tensor, axes: DeviceMesh, source: Layout, target: Layout) -> Tensor:
    """Local tensor in the layout `target` of a local tensor in the layout `source`; its backward goes the other way.

    Both layouts divide evenly. A gradient has the layout of its tensor: where that is replicated, it is complete and
    equal on all ranks.
    """
    if source == target:
        return tensor
    return DTensor.from_local(tensor, axes, source, run_check=False).redistribute(placements=target).to_local()


@cache
def _named_mesh(device_type: str, shape: tuple[int, int, int, int]) -> DeviceMesh:
    mesh = _mesh(device_type, ranks_by_machine(), shape, (PIPELINE, REPLICAS, SHARDS, TENSOR))
    assert mesh is not None
    return mesh


@cache
def _mesh(
    device_type: str, ranks: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...]
) -> DeviceMesh | None:
    """Mesh of ranks, the last axis innermost, with the groups of earlier meshes; None on other ranks than these."""
    mesh, groups = torch.tensor(ranks).reshape(shape), []
    for axis, name in enumerate(names):
        rows = mesh.movedim(axis, -1).reshape(-1, shape[axis]).tolist()
        purpose = "" if shape[axis] == 1 else _PURPOSES.get(name, "activations")
        groups.append(_group(purpose, tuple(map(tuple, rows))))
    if dist.get_rank() not in ranks:
        return None
    return DeviceMesh.from_group(
        [group for group in groups if group is not None], device_type, mesh, mesh_dim_names=names
    )


@cache
def _group(purpose: str, rows: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
    """Group that has this rank, of those that rows of ranks form for a purpose; None if no row has it."""
    del purpose
    whole = dist.group.WORLD
    if len(rows[0]) == dist.get_world_size():
        return whole
    if getattr(whole, "bound_device_id", None) is not None:  # NCCL splits its communicator once for all rows
        return dist.split_group(split_ranks=[list(row) for row in rows])
    made = {row: dist.new_group(list(row)) for row in rows}
    return next((group for row, group in made.items() if dist.get_rank() in row), None)
