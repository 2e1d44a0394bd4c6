"""``load``: from a plan and a module to a step that trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.graph.operator_graph import OutputRole
from planner.graph.optimizers import optimizer_named
from planner.graph.placement import REPLICATE, Placement
from planner.layers.plan.document import LayerPlan, is_layer_plan, load_layer_plan
from planner.models.closed_over import lift_tensors
from planner.models.references import ModelReference, TrainingStep, check_code, reference_of
from planner.plan.decision import canonical_json
from planner.plan.document import Plan, PlanError, load_plan
from planner.schedule.instructions import Wait
from planner.strategies.traced_step import trace_step
from planner.torch_adapter.deferred_values import DeferredValues
from planner.torch_adapter.local.collectives import MeshGroups
from planner.torch_adapter.tracing.step_module import StepArguments
from runtime.job.device_memory import check_device_memory
from runtime.job.layout import device_mesh, print_layout_note
from runtime.job.planned_device import calibration_note, check_kind, device_of_run, kind_for_rank
from runtime.job.process_group import broadcast_text
from runtime.job.slurm import adopt_slurm
from runtime.layers.reference import model_reference
from runtime.library.batch import Batch, BatchShares
from runtime.library.errors import LoadError
from runtime.library.layer_step import load_layer_step
from runtime.library.operator_step import OperatorStep
from runtime.library.optimizers.memory import check_excess, measured_optimizer, predicted_peak
from runtime.library.optimizers.probe import OptimizerFactory, check_element_wise, make_optimizer, stand_ins
from runtime.library.optimizers.scaling import LossScaling
from runtime.library.optimizers.user import (
    Clipping,
    ShardNames,
    UpdateOrder,
    UserOptimizer,
    planned_optimizer,
    update_order,
)
from runtime.library.process import chosen_device, join
from runtime.library.sources import LoadOptions, module_tensors, place, planned_step, seeded_step
from runtime.library.step import Step
from runtime.library.weights import Weights
from runtime.operators.checked_plan import check_ranks, checked_schedule
from runtime.operators.training import LocalTraining


def load(
    plan: Plan | LayerPlan | Path | str,
    module: nn.Module | None = None,
    *,
    optimizer: OptimizerFactory | None = None,
    weights: Weights | None = None,
    batch: Batch | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    clip_norm: float | None = None,
    accumulate: int | None = None,
    loss_scaling: LossScaling | None = None,
    device: torch.device | str | None = None,
    allow_code: bool = False,
) -> Step:
    """Step that trains as a plan says, of operators or of layers, in a process of a job with the plan's ranks.

    A collective of all ranks. Started by torchrun or srun, in a process group that exists already, or alone for a plan
    of one rank.

    Parameters
    ----------
    plan
        A plan, or its file, which rank 0 reads.
    module
        The planned module in training mode, on the CPU (the values of rank 0 count) or on ``meta``. Its tensors are
        replaced by DTensors in place. None: the module that the plan names.
    optimizer
        An element-wise class of ``torch.optim``, a ``functools.partial`` of it, or a function from a list of (name,
        parameter) to an optimizer. None: the plan's, with the settings of ``meshwright run``.
    weights
        Initial values: a state dict, a file of safetensors or torch, or a folder as ``from_pretrained`` reads it. None:
        the module's own, or those of the plan's seed if there is no module.
    batch
        An example of a global batch, of which shapes and dtypes count. None: that of the model that the plan names.
    loss_fn
        As in :func:`planner.strategies.traced_step.trace_step`; with a ``batch`` only. A tensor that it closes over is
        an argument of every later batch, by the name of its variable.
    clip_norm
        Largest norm of all gradients together; ``inf`` measures it and changes nothing.
    accumulate
        Micro-batches of a step, each of the plan's: their gradients are averaged. None: as many as the plan has. A plan
        of layers has its own.
    loss_scaling
        For float16: the loss is scaled, and a step whose gradients overflow is skipped on all ranks.
    device
        ``cpu`` or ``cuda``; None: the kind that the plan is for. A rank that cannot read the plan takes CUDA where
        every rank of its machine has a device.
    allow_code
        Whether the plan may import the module that it names, where ``module`` or ``batch`` is left out.

    Raises
    ------
    ModelError
        The plan's model cannot be built, or is code that was not allowed.
    FamilyError, LoadError, LaunchError, PlanError
        The plan is of another step or number of ranks, or the device is not there; a layer plan's model has no layers.
    OptimizerRefusedError
        The optimizer is not element-wise, or needs more memory than the plan's limit.
    WeightsError
        The weights are not those of the model.
    """
    adopt_slurm()
    place_of_rank = chosen_device(_kind(plan) if device is None else device)
    join(place_of_rank)
    plan = _shared(plan)
    reference = reference_of(plan.decision.model) if isinstance(plan, Plan) else model_reference(plan)
    if isinstance(plan, Plan):
        check_ranks(plan, dist.get_world_size())
        print_layout_note(plan.decision.options.mesh, plan.decision.options.cluster)
    if device is None:
        check_kind(plan, place_of_rank.type)
    if dist.get_rank() == 0 and (note := calibration_note(plan)):
        warnings.warn(note, stacklevel=2)
    reserve = plan.decision.options.reserve_bytes if isinstance(plan, Plan) else 0
    held = plan.peak_bytes if isinstance(plan, Plan) else plan.held_bytes
    check_device_memory(held, place_of_rank, reserve)
    if allow_code:
        check_code(reference.source, allowed=True)
    step, seeded = _training_step(reference, module, weights, batch, loss_fn)
    if accumulate is None:
        accumulate = plan.decision.options.grad_accum if isinstance(plan, Plan) else 1
    if loss_scaling is not None and clip_norm is None:
        clip_norm = inf  # its norm says whether a gradient overflowed
    how = LoadOptions(optimizer, weights, seeded, clip_norm, place_of_rank, accumulate, loss_scaling)
    return load_layer_step(plan, step, how) if isinstance(plan, LayerPlan) else _operator_step(plan, step, how)


def _operator_step(plan: Plan, step: TrainingStep, how: LoadOptions) -> OperatorStep:
    module, device, clip_norm = step.module, how.device, how.clip_norm
    reduce_dtype = reference_of(plan.decision.model).reduce_dtype
    traced = trace_step(module, step.example_args, step.example_kwargs, step.loss_fn, reduce_dtype)
    schedule = checked_schedule(plan, traced, dist.get_world_size())
    options = plan.decision.options
    spec = optimizer_named(options.optimizer, fused=options.is_fused)
    factory = how.optimizer or planned_optimizer(spec)
    trained = {
        value.name: torch.empty(value.spec.shape, dtype=getattr(torch, value.spec.dtype), device="meta")
        for value in traced.graph.parameters
        if value.trainable
    }
    dimensions = {name: tensor.ndim for name, tensor in trained.items()}
    check_element_wise(factory, dimensions, device)
    order = update_order(make_optimizer(factory, list(stand_ins(dimensions, device).items())), clip_norm)
    measured = measured_optimizer(factory, trained, spec, clip_norm, device)
    scale = how.loss_scale(trained.values(), spec)
    if how.accumulate < 1:
        raise LoadError(f"accumulate {how.accumulate}: a step has at least one micro-batch")
    if how.accumulate > 1:  # the sums of gradients live for the whole step
        measured = measured.with_gradients()
        order = UpdateOrder.AFTER_ALL if order is UpdateOrder.AS_PLANNED else order
    loss = next(traced.graph.values[o.value] for o in traced.graph.outputs if o.role is OutputRole.LOSS)
    if scale is not None and loss.spec.dtype == "float16":
        raise LoadError(
            "loss_scaling: the model's loss is float16, in which a scaled loss overflows: return it in 32 bits"
        )
    peak = predicted_peak(traced.graph, schedule, measured, order, options.device or "cpu")
    check_excess(peak, plan.peak_bytes, options.limit_bytes, factory, options.optimizer)
    overlapping = any(isinstance(entry, Wait) for entry in schedule.instructions)
    mesh = device_mesh(device.type, options.mesh)
    groups = MeshGroups.of(mesh, overlapping=overlapping)
    first_names = {alias: tensor.name for tensor in module_tensors(module) for alias in (tensor.name, *tensor.aliases)}
    saved_names = {key: first_names[key] for key in module.state_dict()}
    with ExitStack() as stack:
        source = stack.enter_context(how.source())
        state = place(traced, schedule, module, how.own_tensors(module), source, groups, mesh, device)

    def made(shards: Mapping[str, Tensor]) -> UserOptimizer:
        placements = {
            traced.graph.values[value].name: schedule.buffers[buffer].placement
            for value, buffer in zip(traced.graph.inputs, schedule.inputs, strict=True)
        }
        clipping = None if clip_norm is None else Clipping(clip_norm, _copies(placements, groups.shape), device)
        updated = {name: ndim for name, ndim in dimensions.items() if name in shards}
        model = ShardNames({name: name for name in shards}, updated)
        return UserOptimizer(factory, shards, spec, clipping, model, scale)

    training = LocalTraining(traced, schedule, groups, state, made, plan.decision.model.seed, device)
    names = StepArguments.of(module, step.example_args, step.example_kwargs).names
    shares = BatchShares.of_schedule(traced.graph, schedule, names, groups.coordinate, how.accumulate)
    return OperatorStep(plan, module, traced, schedule, training, groups, device, shares, saved_names, peak)


def _copies(placements: Mapping[str, Placement], mesh: tuple[int, ...]) -> dict[str, int]:
    """Ranks that hold the same block of each tensor."""
    return {
        name: prod(size for entry, size in zip(placement, mesh, strict=True) if entry == REPLICATE)
        for name, placement in placements.items()
    }


def _kind(plan: Plan | LayerPlan | Path | str) -> str | None:
    """Kind of device that a plan is for; None where this rank cannot read it."""
    if isinstance(plan, (Plan, LayerPlan)):
        return device_of_run(None, plan)
    with suppress(PlanError, TypeError):
        return kind_for_rank(None, Path(plan))
    return None


def _shared(plan: Plan | LayerPlan | Path | str) -> Plan | LayerPlan:
    """The plan of rank 0 on every rank."""
    if not isinstance(plan, (Plan, LayerPlan, Path, str)):
        raise LoadError(f"plan is a {type(plan).__name__}: give a plan of planner.api or the path of its file")
    text = failure = ""
    if dist.get_rank() == 0:
        try:
            if isinstance(plan, (Path, str)):
                path = Path(plan)
                plan = load_layer_plan(path) if is_layer_plan(path) else load_plan(path)
            text = ("layers" if isinstance(plan, LayerPlan) else "operators") + canonical_json(plan)
        except PlanError as error:
            failure = str(error)
    failure = broadcast_text(failure)
    if failure:
        raise PlanError(failure)
    kind, brace, rest = broadcast_text(text).partition("{")
    return (LayerPlan if kind == "layers" else Plan).model_validate_json(brace + rest)


def _training_step(
    reference: ModelReference,
    module: nn.Module | None,
    weights: Weights | None,
    batch: Batch | None,
    loss_fn: Callable[..., Tensor] | None,
) -> tuple[TrainingStep, DeferredValues | None]:
    """The step to trace, and the values of its parameters where they are those of the plan's seed."""
    if module is None:
        if batch is not None or loss_fn is not None:
            raise LoadError("batch and loss_fn belong to a module of your own: give the module as well")
        return seeded_step(reference) if weights is None else (planned_step(reference), None)
    if not isinstance(module, nn.Module):
        raise LoadError(f"module is a {type(module).__name__}: give an nn.Module or None")
    if batch is None:
        if loss_fn is not None:
            raise LoadError("loss_fn without a batch: give an example of a global batch as well")
        named = planned_step(reference)
        return TrainingStep(module, named.example_args, named.example_kwargs, named.loss_fn), None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    else:
        args = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    loss_fn, kwargs = lift_tensors(module, kwargs, loss_fn)
    return TrainingStep(module, args, kwargs, loss_fn), None
