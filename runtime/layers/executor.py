"""A layer plan as modules of torch's own engine: one stage of it, on this rank.

Each unit is rewritten, given its values, shared by tensor parallelism and sharded by FSDP2, in that order; between two
units hidden states are resharded by DTensor on the stage's prime axes.

Gradients are summed, never averaged: the loss on every device is its rows' part of the loss of the whole batch, so that
neighbours may have different degrees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from planner.layers.plan.document import LayerPlan, LayerSettings
from runtime.layers.assignment import PlannedUnit, assign_layers, tied_parameters
from runtime.layers.families.units import Carried, LayerUnit, ModelFamily
from runtime.layers.memory import HiddenOffload, keep_as_planned
from runtime.layers.mesh import Layout, PlanMeshes, reshard
from runtime.layers.parameters import (
    Origin,
    Origins,
    allocate,
    fill,
    origins_by_path,
    parameter_block,
    split_linears,
)
from runtime.layers.sharding import shard_stage
from runtime.layers.tensor_parallel import repeat_products, share_products
from runtime.measure.host_copies import HostCopies
from runtime.measure.local_shards import Block, BlockReader


class LayerStage(nn.Module):
    """The units of one stage, called one after the other on local tensors.

    Parameters
    ----------
    units
        The units, sharded.
    incoming
        Layout of each tensor that the stage is given; None: the same on all devices.
    layouts
        For each unit, the layouts of its inputs and of its outputs.
    meshes
        Meshes of this rank.
    gives_logits
        Whether the last unit is the model's.
    outgoing
        Layout of each tensor that the stage hands over; that of its last unit if None.
    """

    def __init__(
        self,
        units: list[LayerUnit],
        incoming: tuple[Layout | None, ...],
        layouts: list[tuple[tuple[Layout | None, ...], tuple[Layout | None, ...]]],
        meshes: PlanMeshes,
        gives_logits: bool,
        outgoing: tuple[Layout | None, ...] | None = None,
    ) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self._incoming = incoming
        self._layouts = layouts
        self._meshes = meshes
        self._gives_logits = gives_logits
        self._outgoing = outgoing

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...] | Tensor:
        """Inputs of the next stage, or the logits."""
        present = self._incoming
        for unit, (takes, gives) in zip(self.units, self._layouts, strict=True):
            carried, present = unit(*self._placed(carried, present, takes)), gives
        if self._gives_logits:
            return carried[0]
        return carried if self._outgoing is None else self._placed(carried, present, self._outgoing)

    def _placed(
        self, tensors: tuple[Tensor, ...], sources: tuple[Layout | None, ...], targets: tuple[Layout | None, ...]
    ) -> tuple[Tensor, ...]:
        axes = self._meshes.axes
        return tuple(
            tensor if source is None or target is None else reshard(tensor, axes, source, target)
            for tensor, source, target in zip(tensors, sources, targets, strict=True)
        )


@dataclass(frozen=True, eq=False)
class BuiltStage:
    """The stage of one rank.

    Parameters
    ----------
    module
        The stage's module, sharded.
    gathered_once
        Modules in it whose parameters are gathered once in a step, for all micro-batches: those of ZeRO-2.
    origins
        Origin of each parameter by its path in `module`.
    blocks
        Place of each parameter and buffer in the model, by its path.
    layers
        Settings by path of the parameter.
    first, last
        Settings of the model's first and last unit.
    shared_with
        Stage that holds a tied parameter as well, by the path of the parameter.
    hidden
        Offloads of its hidden states; every step is one of theirs.
    """

    module: LayerStage
    gathered_once: list[FSDPModule]
    origins: Mapping[str, Origin]
    blocks: Mapping[str, Block]
    layers: Mapping[str, LayerSettings]
    first: LayerSettings
    last: LayerSettings
    shared_with: Mapping[str, int]
    hidden: HiddenOffload


def build_stage(
    plan: LayerPlan, family: ModelFamily, model: nn.Module, meshes: PlanMeshes, read: BlockReader
) -> BuiltStage:
    """Build this rank's stage; a collective of all ranks.

    Parameters
    ----------
    plan
        A plan that :func:`runtime.layers.check.check_model` passed.
    family, model
        The model, its parameters without storage, and its units, which are rewritten.
    meshes
        Meshes of this rank.
    read
        The model's initial parameters and buffers.

    Raises
    ------
    PlanError
        More than two stages have a parameter.
    """
    device = torch.device("cpu") if meshes.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
    stages = assign_layers(plan, family)
    mine = stages[meshes.stage]
    named = {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    origins: Origins = {parameter: Origin(name) for name, parameter in model.named_parameters()}
    shared = _shared_between_stages(stages, meshes.stage, origins)
    buffers = {buffer: name for name, buffer in model.named_buffers()}
    for planned in mine:
        for layer, inside in planned.layers():
            split_linears(
                planned.unit,
                inside,
                origins,
                tensor_parallel=layer.shares_products,
                slices=layer.slices,
                name=layer.name,
            )
    units = [planned.unit for planned in mine]
    by_path = {f"units.{path}": origin for path, origin in origins_by_path(units, origins).items()}
    layers = _settings_by_path(mine)
    _share_products(mine, meshes)
    hidden = HiddenOffload(HostCopies(device))
    for planned in mine:
        for layer, inside in planned.layers():
            keep_as_planned(inside, layer, hidden)
    incoming = _given(stages[meshes.stage - 1][-1], meshes) if meshes.stage else _taken(stages[0][0], meshes)
    outgoing = None
    if not meshes.is_even:  # rows alone are divided between stages, among the devices of either
        before = stages[meshes.stage - 1][-1].unit.gives if meshes.stage else stages[0][0].unit.takes
        incoming = (meshes.batch_layout(mine[0].whole),) * len(before)
        outgoing = (meshes.batch_layout(mine[-1].whole),) * len(mine[-1].unit.gives)
    layouts = [(_taken(planned, meshes), _given(planned, meshes)) for planned in mine]
    stage = LayerStage(units, incoming, layouts, meshes, meshes.stage == meshes.stages - 1, outgoing)
    buffer_paths = {path: buffers[buffer] for path, buffer in stage.named_buffers()}
    reduce_dtype = torch.float32 if plan.model.reduce_dtype == "float32" else None
    gathered_once = shard_stage(stage, mine, meshes, device, reduce_dtype)
    allocate(stage, device, lambda path: layers[path].offload_parameters)
    blocks = {
        path: parameter_block(parameter, by_path[path], named[by_path[path].name])
        for path, parameter in stage.named_parameters()
    }
    blocks |= {
        path: Block(name, named[name], (0,) * len(named[name]), named[name]) for path, name in buffer_paths.items()
    }
    fill(stage, blocks, named, read)
    return BuiltStage(
        module=stage,
        gathered_once=gathered_once,
        origins=by_path,
        blocks=blocks,
        layers=layers,
        first=stages[0][0].whole,
        last=stages[-1][-1].whole,
        shared_with={path: shared[origin.name] for path, origin in by_path.items() if origin.name in shared},
        hidden=hidden,
    )


def _layout(kind: Carried, layer: LayerSettings, meshes: PlanMeshes) -> Layout | None:
    if kind is Carried.SHARED:
        return None
    return meshes.hidden_layout(layer) if kind is Carried.HIDDEN else meshes.batch_layout(layer)


def _taken(planned: PlannedUnit, meshes: PlanMeshes) -> tuple[Layout | None, ...]:
    return tuple(_layout(kind, planned.whole, meshes) for kind in planned.unit.takes)


def _given(planned: PlannedUnit, meshes: PlanMeshes) -> tuple[Layout | None, ...]:
    return tuple(_layout(kind, planned.whole, meshes) for kind in planned.unit.gives)


def _shared_between_stages(stages: tuple[tuple[PlannedUnit, ...], ...], stage: int, origins: Origins) -> dict[str, int]:
    """Names of this stage's parameters that a second stage has too, with that stage."""
    names: dict[str, int] = {}
    for parameter, held in tied_parameters(stages).items():
        numbers = sorted({number for number, _ in held})
        if len(numbers) == 2 and stage in numbers:
            names[origins[parameter].name] = numbers[1 - numbers.index(stage)]
    return names


def _settings_by_path(mine: Iterable[PlannedUnit]) -> dict[str, LayerSettings]:
    """Settings of the layer that each parameter of the stage belongs to, by the parameter's path."""
    found = {}
    for position, planned in enumerate(mine):
        for name, _ in planned.unit.named_parameters(remove_duplicate=False):
            found[f"units.{position}.{name}"] = planned.settings_at(name)
    return found


def _share_products(mine: Iterable[PlannedUnit], meshes: PlanMeshes) -> None:
    """Tensor parallelism of the stage; parameters that were tied are tied afterwards."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for planned in mine:
        for module in planned.unit.modules():
            for name, parameter in module.named_parameters(recurse=False):
                places.setdefault(parameter, []).append((module, name))
    for planned in mine:
        meshes_of = partial(_tensor_mesh, planned, meshes)
        if planned.whole.shares_products:
            share_products(planned.unit, meshes_of, planned.whole.sequence_parallel)
        elif planned.whole.tensor_parallel > 1:
            repeat_products(planned.unit, meshes_of)
    for tied in places.values():
        present: list[nn.Parameter] = [getattr(module, name) for module, name in tied]
        shared = next((parameter for parameter in present if isinstance(parameter.data, DTensor)), present[0])
        for module, name in tied:
            module.register_parameter(name, shared)


def _tensor_mesh(planned: PlannedUnit, meshes: PlanMeshes, path: str) -> DeviceMesh:
    """Mesh of the devices that share a module's products, of the same root as the mesh of the shards, for FSDP2."""
    return meshes.tensor(planned.settings_at(path))
