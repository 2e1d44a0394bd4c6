"""The module of a plan without its weights in memory, and the tensors that each rank places."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_parameter_registration_hook

from planner.graph.operator_graph import Value, ValueRole
from planner.graph.placement import Placement
from planner.models.references import TrainingStep, check_code, load_step, reference_of
from planner.plan.document import Plan, save_plan
from planner.schedule.instructions import Schedule
from planner.strategies.traced_step import TracedStep
from planner.torch_adapter.local.collectives import MeshGroups
from runtime.job.rank_job import RunOptions, is_first_here, make_initial_state, scratch_folder
from runtime.library.dtensors import as_dtensor, put_into
from runtime.library.errors import WeightsError
from runtime.library.weights import MappedTensors, ModuleTensors, TensorSource, find_names
from runtime.measure.initial_state import copied, read_initial_state
from runtime.measure.local_shards import block_slices

PLAN_FILE = "plan.json"


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Give parameters of modules that are built inside no memory, and their buffers real values.

    Each parameter exists for a moment; its initialisation does nothing.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta":
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        hook.remove()


def planned_step(plan: Plan) -> TrainingStep:
    """The training step that a plan names, its parameters on ``meta``.

    Raises
    ------
    ModelError
        It is code that nobody allowed (:func:`planner.models.references.check_code`).
    """
    check_code(plan.decision.model.source)
    with parameters_on_meta():
        return load_step(reference_of(plan), "cpu")


@contextmanager
def seeded_tensors(plan: Plan) -> Iterator[TensorSource]:
    """Initial tensors of the plan's seed, which one process of each machine makes; a collective of all ranks."""
    options = RunOptions(Path(), 1, False, None, "cpu", None, Path(tempfile.gettempdir()))
    with scratch_folder(options) as own:
        copy = own.scratch / PLAN_FILE
        if is_first_here():
            save_plan(plan, copy)
        make_initial_state("runtime.measure.reference", copy, own)
        yield MappedTensors(read_initial_state(own.scratch).tensors)


def place(
    traced: TracedStep,
    schedule: Schedule,
    module: nn.Module,
    source: TensorSource | None,
    groups: MeshGroups,
    mesh: DeviceMesh,
    device: torch.device,
) -> dict[str, Tensor]:
    """Put this rank's blocks of parameters and module buffers on the device; the module gets DTensors of them.

    Parameters
    ----------
    traced, schedule
        The step and its schedule.
    module
        Its tensors are replaced one by one, in place. Buffers that the source lacks are its own.
    source
        Where the tensors come from; None: the module itself.
    groups, mesh, device
        This rank's place.

    Returns
    -------
    dict
        Local tensors by first name, constants of the graph included.

    Raises
    ------
    WeightsError
        The source lacks a tensor, or has it in another shape; the module is unchanged.
    """
    values = {
        traced.graph.values[value].name: (traced.graph.values[value], schedule.buffers[buffer].placement)
        for value, buffer in zip(traced.graph.inputs, schedule.inputs, strict=True)
        if traced.graph.values[value].role in (ValueRole.PARAMETER, ValueRole.BUFFER)
    }
    own = ModuleTensors(module, device)
    named = {name: entry for name, entry in values.items() if name not in traced.constants}
    chosen = _chosen(named, own, source)
    local: dict[str, Tensor] = {}
    for name, (value, placement) in values.items():
        slices = block_slices(value.spec.shape, placement, groups.shape, groups.coordinate)
        if name in traced.constants:
            local[name] = copied(traced.constants[name][slices], device)
            continue
        origin, found = chosen[name]
        block = origin.block(found, slices)
        wanted = getattr(torch, value.spec.dtype)
        local[name] = torch.empty(block.shape, dtype=wanted, device=device).copy_(block)
        del block
        own.forget(name)
        tensor = as_dtensor(local[name], placement, value.spec.shape, mesh)
        put_into(module, {name: tensor}, {name: value.aliases})
    return local


def _chosen(
    named: Mapping[str, tuple[Value, Placement]], own: ModuleTensors, source: TensorSource | None
) -> dict[str, tuple[TensorSource, str]]:
    """Source of each tensor and its name there, all of the right shape."""
    chosen: dict[str, tuple[TensorSource, str]] = {}
    if source is not None:
        buffers = [name for name, (value, _) in named.items() if value.role is ValueRole.BUFFER]
        aliases = {name: value.aliases for name, (value, _) in named.items()}
        chosen = {name: (source, found) for name, found in find_names(source, aliases, buffers).items()}
    for name, (value, _) in named.items():
        if name not in chosen:
            if own.is_on_meta(name):
                raise WeightsError(
                    f"{value.role} {name} has no data, the module is on meta: give weights that hold it, or build the "
                    "module on the CPU, under runtime.parameters_on_meta() to save memory"
                )
            chosen[name] = own, name
        origin, found = chosen[name]
        if origin.shape(found) != value.spec.shape:
            raise WeightsError(f"{found} of the weights has shape {origin.shape(found)}, the model {value.spec.shape}")
    return chosen
