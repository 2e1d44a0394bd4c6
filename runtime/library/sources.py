"""The module of a plan without its weights in memory, and the tensors that each rank places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from planner.graph.operator_graph import ValueRole
from planner.graph.optimizers import OptimizerSpec
from planner.models.references import ModelReference, TrainingStep, check_code, load_step
from planner.schedule.instructions import Schedule
from planner.strategies.traced_step import TracedStep
from planner.torch_adapter.deferred_values import DeferredValues, deferred_parameters, parameters_on_meta
from planner.torch_adapter.local.collectives import MeshGroups
from planner.torch_adapter.tracing.step_module import StepArguments, named_state
from runtime.library.dtensors import as_dtensor, put_into
from runtime.library.errors import LoadError, WeightsError
from runtime.library.optimizers.probe import OptimizerFactory
from runtime.library.optimizers.scaling import LossScale, LossScaling
from runtime.library.weights import ModuleTensors, TensorSource, Weights, find_names, open_weights
from runtime.measure.initial_state import copied
from runtime.measure.local_shards import BlockReader, Slices, block_slices


def planned_step(reference: ModelReference) -> TrainingStep:
    """The training step of a plan's reference, its parameters on ``meta``.

    Raises
    ------
    ModelError
        It is code that nobody allowed (:func:`planner.models.references.check_code`).
    """
    check_code(reference.source)
    with parameters_on_meta():
        return load_step(reference, "cpu")


def seeded_step(reference: ModelReference) -> tuple[TrainingStep, DeferredValues]:
    """Same as :func:`planned_step`, with the parameters' values of the reference's seed, which rank 0 alone draws."""
    check_code(reference.source)
    if dist.get_rank() != 0:
        return planned_step(reference), DeferredValues()
    with deferred_parameters() as values:
        return load_step(reference, "cpu"), values


def shared_examples(step: TrainingStep, device: torch.device) -> tuple[Tensor, ...]:
    """Example tensors of a step as rank 0 has them, in the order of the arguments; a collective of all ranks.

    A function that draws them behind its parameters draws others where the parameters were not drawn.
    """
    found = []
    for tensor in StepArguments.of(step.module, step.example_args, step.example_kwargs).tensors:
        shared = tensor.to(device, copy=True)
        dist.broadcast(shared, 0)
        found.append(shared.to(tensor.device))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the user of :func:`runtime.load` chose.

    ``seeded`` has the values of the plan's seed, where the parameters are these; with ``loss_scaling`` there is a
    ``clip_norm``, which may be infinite.
    """

    optimizer: OptimizerFactory | None
    weights: Weights | None
    seeded: DeferredValues | None
    clip_norm: float | None
    device: torch.device
    accumulate: int = 1
    loss_scaling: LossScaling | None = None

    def loss_scale(self, parameters: Iterable[Tensor], spec: OptimizerSpec) -> LossScale | None:
        """Scale of the loss of an optimizer over some parameters; None: it is not scaled.

        Raises
        ------
        LoadError
            Parameters of 16 bits would be trained with gradients of 16 bits.
        """
        if self.loss_scaling is None:
            return None
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
        for dtype in dtypes:
            if dtype == "float16" and not spec.keeps_master(dtype):
                raise LoadError(
                    f"loss_scaling: the plan's optimizer {spec.name} trains {dtype} parameters with gradients of 16 "
                    "bits; plan with --optimizer adamw_mixed, which keeps copies of 32 bits"
                )
        return LossScale(self.loss_scaling)

    def own_tensors(self, module: nn.Module) -> ModuleTensors:
        """Tensors of the module itself."""
        return ModuleTensors(module, self.device, self.seeded)

    @contextmanager
    def source(self) -> Iterator[TensorSource | None]:
        """Where the initial tensors come from; None: the module itself, or the plan's seed."""
        source = None if self.weights is None else open_weights(self.weights)
        try:
            yield source
        finally:
            if source is not None:
                source.close()


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or buffer of a model, by its first name and the other names of the same tensor."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    is_buffer: bool


def module_tensors(module: nn.Module) -> list[ModelTensor]:
    """Parameters, then buffers of a module."""
    groups = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return [
        ModelTensor(named.name, named.aliases, tuple(named.tensor.shape), is_buffer)
        for is_buffer, group in zip((False, True), groups, strict=True)
        for named in named_state(group)
    ]


def initial_reader(tensors: Iterable[ModelTensor], own: ModuleTensors, source: TensorSource | None) -> BlockReader:
    """Reader of a model's initial tensors, each of which is read once.

    Parameters
    ----------
    tensors
        The model's.
    own
        The module itself: its buffers are taken where the source lacks them.
    source
        Where the tensors come from; None: the module itself.

    Raises
    ------
    WeightsError
        The source lacks a tensor, or has it in another shape.
    """
    described = {entry.name: entry for entry in tensors}
    chosen: dict[str, tuple[TensorSource, str]] = {}
    if source is not None:
        buffers = [name for name, entry in described.items() if entry.is_buffer]
        aliases = {name: entry.aliases for name, entry in described.items()}
        chosen = {name: (source, found) for name, found in find_names(source, aliases, buffers).items()}
    for name, entry in described.items():
        if name not in chosen:
            if own.is_on_meta(name):
                raise WeightsError(
                    f"{'buffer' if entry.is_buffer else 'parameter'} {name} has no data, the module is on meta: give "
                    "weights that hold it, or build the module on the CPU, under runtime.parameters_on_meta() to save "
                    "memory"
                )
            chosen[name] = own, name
        origin, found = chosen[name]
        if origin.shape(found) != entry.shape:
            raise WeightsError(f"{found} of the weights has shape {origin.shape(found)}, the model {entry.shape}")

    def read(name: str, wanted: Sequence[Slices]) -> Sequence[Tensor]:
        origin, found = chosen[name]
        blocks = origin.blocks(found, wanted)
        own.forget(name)
        return blocks

    return read


def reader_without_module(module: nn.Module, own: ModuleTensors, source: TensorSource | None) -> BlockReader:
    """As :func:`initial_reader`; the module's parameters are on ``meta`` afterwards."""
    read = initial_reader(module_tensors(module), own, source)
    for named in named_state(module.named_parameters(remove_duplicate=False)):
        put_into(module, {named.name: torch.empty_like(named.tensor, device="meta")}, {named.name: named.aliases})
    return read


def place(
    traced: TracedStep,
    schedule: Schedule,
    module: nn.Module,
    own: ModuleTensors,
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
        Its tensors are replaced one by one, in place.
    own
        Its tensors; buffers that the source lacks are among them.
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
    tensors = [
        ModelTensor(name, value.aliases, value.spec.shape, value.role is ValueRole.BUFFER)
        for name, (value, _) in values.items()
        if name not in traced.constants
    ]
    read = initial_reader(tensors, own, source)
    local: dict[str, Tensor] = {}
    for name, (value, placement) in values.items():
        slices = block_slices(value.spec.shape, placement, groups.shape, groups.coordinate)
        if name in traced.constants:
            local[name] = copied(traced.constants[name][slices], device)
            continue
        (block,) = read(name, [slices])
        wanted = getattr(torch, value.spec.dtype)
        local[name] = torch.empty(block.shape, dtype=wanted, device=device).copy_(block)
        del block
        tensor = as_dtensor(local[name], placement, value.spec.shape, mesh)
        put_into(module, {name: tensor}, {name: value.aliases})
    return local
