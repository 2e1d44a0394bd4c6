"""Data parallelism of a stage: every layer a group of FSDP2, on the mesh of its replicas and shards.

Replication is FSDP2 too, on a mesh whose axis of shards has size one: it composes with tensor parallelism and with
replicas of shards (HSDP), which ``DistributedDataParallel`` does not. It costs a second copy of a layer's parameters
while the layer runs: they are freed after its forward as well, and gathering them again is a copy on the device.

ZeRO-2 keeps a layer's parameters from its first forward to its last backward of the step. ZeRO-3 gathers them for every
forward and again for every backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from planner.layers.plan.document import LayerSettings
from runtime.layers.assignment import PlannedUnit, tied_parameters
from runtime.layers.mesh import PlanMeshes
from runtime.layers.parameters import SplitLinear


def shard_stage(
    stage: nn.Module,
    planned_units: Sequence[PlannedUnit],
    meshes: PlanMeshes,
    device: torch.device,
    reduce_dtype: torch.dtype | None = None,
) -> list[FSDPModule]:
    """Shard or replicate every layer of a stage: slices first, then parts, then units, then the stage itself.

    Parameters
    ----------
    stage
        The stage's module.
    planned_units
        Its units, whose parameters are whole but for tensor parallelism.
    meshes
        Meshes of this rank.
    device
        Device of this rank.
    reduce_dtype
        Dtype in which gradients are summed; None: their own.

    Returns
    -------
    list
        Modules whose parameters are gathered once in a step: those of ZeRO-2.
    """
    precision = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    sharder = _Sharder(meshes, device, precision)
    for planned in planned_units:
        for path in planned.unit.rules.own_calls:
            table = dict(planned.unit.named_modules()).get(path)
            if planned.parts and table is not None:
                sharder.shard([table], planned.settings_at(path))
        for layer, inside in planned.layers():
            sharder.shard_slices(inside, layer)
            if planned.parts:
                sharder.shard([inside], layer)
    for group in _units_with_ties(planned_units):
        sharder.shard([planned.unit for planned in group], group[0].whole)
    data = meshes.parameters(planned_units[0].whole)
    fully_shard(stage, mesh=data, reshard_after_forward=False, mp_policy=precision)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return sharder.gathered_once


def free_after_backward(gathered_once: Iterable[FSDPModule], freed: bool) -> None:
    """Set whether ZeRO-2 layers free their parameters after the next backward; all others always do."""
    for module in gathered_once:
        module.set_reshard_after_backward(freed, recurse=False)


class _Sharder:
    """Calls FSDP2 and remembers the layers of ZeRO-2."""

    def __init__(self, meshes: PlanMeshes, device: torch.device, precision: MixedPrecisionPolicy) -> None:
        self._meshes = meshes
        self._precision = precision
        self._on_host = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        self.gathered_once: list[FSDPModule] = []

    def shard(self, modules: Sequence[nn.Module], layer: LayerSettings) -> None:
        """Make one group of some modules."""
        made = fully_shard(
            list(modules) if len(modules) > 1 else modules[0],
            mesh=self._meshes.parameters(layer),
            reshard_after_forward=layer.sharding != "zero2",
            mp_policy=self._precision,
            offload_policy=self._on_host if layer.offload_parameters else OffloadPolicy(),
        )
        if layer.sharding == "zero2":
            self.gathered_once.append(made[0] if isinstance(made, list) else made)

    def shard_slices(self, inside: nn.Module, layer: LayerSettings) -> None:
        """Make every slice of a layer's matrices a group of its own."""
        if layer.slices == 1:
            return
        sharded = layer.slices if layer.sharded_slices is None else layer.sharded_slices
        replicated = layer.model_copy(update={"sharding": "none", "shard_degree": None})
        for module in list(inside.modules()):
            if isinstance(module, SplitLinear) and all(isinstance(piece, nn.Linear) for piece in module.pieces):
                for number, piece in enumerate(module.pieces):
                    self.shard([piece], layer if number < sharded else replicated)


def _units_with_ties(planned_units: Sequence[PlannedUnit]) -> list[list[PlannedUnit]]:
    """Groups of units: those that share a parameter are in one group, as FSDP2 requires."""
    groups: list[list[PlannedUnit]] = [[planned] for planned in planned_units]
    for held in tied_parameters([planned_units]).values():
        joined = [group for group in groups if any(planned in group for _, planned in held)]
        groups = [group for group in groups if group not in joined] + [[one for group in joined for one in group]]
    return groups
