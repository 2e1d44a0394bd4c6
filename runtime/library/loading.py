"""``load``: from a plan and a module to a step that trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from planner.graph.optimizers import OptimizerSpec, optimizer_named
from planner.layers.plan.document import LayerPlan, is_layer_plan
from planner.models.references import TrainingStep, check_code
from planner.plan.document import Plan, PlanError, load_plan
from planner.plan.format import canonical_json
from planner.schedule.instructions import Schedule, Wait
from planner.strategies.traced_step import TracedStep, trace_step
from planner.torch_adapter.local.collectives import MeshGroups
from planner.torch_adapter.tracing.step_module import StepArguments
from runtime.job.process_group import broadcast_text
from runtime.library.batch import Batch
from runtime.library.errors import LoadError, MemoryWarning, OptimizerRefusedError
from runtime.library.memory import MeasuredOptimizer, excess_message, predicted_peak
from runtime.library.optimizer import Clipping, UserOptimizer, planned_optimizer, update_order
from runtime.library.optimizer_probe import (
    ElementBytes,
    OptimizerFactory,
    check_element_wise,
    element_bytes,
    make_optimizer,
    stand_ins,
)
from runtime.library.process import chosen_device, join
from runtime.library.sources import place, planned_step, seeded_tensors
from runtime.library.step import Step
from runtime.library.weights import Weights, open_weights
from runtime.operators.checked_plan import check_ranks, checked_schedule
from runtime.operators.training import LocalTraining

_MASTER_BYTES = 4


def load(
    plan: Plan | Path | str,
    module: nn.Module | None = None,
    *,
    optimizer: OptimizerFactory | None = None,
    weights: Weights | None = None,
    batch: Batch | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    clip_norm: float | None = None,
    device: torch.device | str | None = None,
    allow_code: bool = False,
) -> Step:
    """Step that trains as an operator plan says, in a process of a job with as many ranks as the plan has.

    A collective of all ranks. Started by torchrun, in a process group that exists already, or alone for a plan of one
    rank.

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
        As in :func:`planner.strategies.traced_step.trace_step`; with a ``batch`` only.
    clip_norm
        Largest norm of all gradients together; ``inf`` measures it and changes nothing.
    device
        ``cpu`` or ``cuda``; None: CUDA where every rank of the machine has a device.
    allow_code
        Whether the plan may import the module that it names, where ``module`` or ``batch`` is left out.

    Raises
    ------
    ModelError
        The plan's model cannot be built, or is code that was not allowed.
    LoadError, LaunchError, PlanError
        The plan is of another step or number of ranks, or the device is not there.
    OptimizerRefusedError
        The optimizer is not element-wise, or needs more memory than the plan's limit.
    WeightsError
        The weights are not those of the model.
    """
    place_of_rank = chosen_device(device)
    join(place_of_rank)
    plan = _shared(plan)
    check_ranks(plan, dist.get_world_size())
    if allow_code:
        check_code(plan.decision.model.source, allowed=True)
    step, from_seed = _training_step(plan, module, weights, batch, loss_fn)
    traced = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)
    schedule = checked_schedule(plan, traced, dist.get_world_size())
    spec = optimizer_named(plan.decision.options.optimizer)
    factory = optimizer or planned_optimizer(spec.name)
    peak = _checked_peak(plan, traced, schedule, factory, spec, clip_norm, place_of_rank)
    overlapping = any(isinstance(entry, Wait) for entry in schedule.instructions)
    mesh = init_device_mesh(place_of_rank.type, plan.decision.options.mesh)
    groups = MeshGroups.of(mesh, overlapping=overlapping)
    with ExitStack() as stack:
        source = open_weights(weights) if weights is not None else None
        if from_seed:
            source = stack.enter_context(seeded_tensors(plan))
        if source is not None:
            stack.callback(source.close)
        state = place(traced, schedule, step.module, source, groups, mesh, place_of_rank)

    def made(shards: Mapping[str, Tensor]) -> UserOptimizer:
        placements = {
            traced.graph.values[value].name: schedule.buffers[buffer].placement
            for value, buffer in zip(traced.graph.inputs, schedule.inputs, strict=True)
        }
        clipping = None if clip_norm is None else Clipping(clip_norm, placements, groups.shape)
        return UserOptimizer(factory, shards, spec, clipping)

    training = LocalTraining(traced, schedule, groups, state, made, plan.decision.model.seed, place_of_rank)
    names = StepArguments.of(step.module, step.example_args, step.example_kwargs).names
    return Step(plan, step.module, traced, schedule, training, groups, mesh, place_of_rank, names, peak)


def _shared(plan: Plan | Path | str) -> Plan:
    """The plan of rank 0 on every rank."""
    if isinstance(plan, LayerPlan) or (isinstance(plan, (Path, str)) and is_layer_plan(Path(plan))):
        named = "this" if isinstance(plan, LayerPlan) else str(plan)
        raise LoadError(f"plan {named} is one of layers: runtime.load takes plans of operators, `meshwright run` both")
    if not isinstance(plan, (Plan, Path, str)):
        raise LoadError(f"plan is a {type(plan).__name__}: give a plan of planner.api or the path of its file")
    text = failure = ""
    if dist.get_rank() == 0:
        try:
            text = canonical_json(plan if isinstance(plan, Plan) else load_plan(Path(plan)))
        except PlanError as error:
            failure = str(error)
    failure = broadcast_text(failure)
    if failure:
        raise PlanError(failure)
    return Plan.model_validate_json(broadcast_text(text))


def _training_step(
    plan: Plan,
    module: nn.Module | None,
    weights: Weights | None,
    batch: Batch | None,
    loss_fn: Callable[..., Tensor] | None,
) -> tuple[TrainingStep, bool]:
    """The step to trace, and whether its tensors are made from the plan's seed."""
    if module is None:
        if batch is not None or loss_fn is not None:
            raise LoadError("batch and loss_fn belong to a module of your own: give the module as well")
        return planned_step(plan), weights is None
    if not isinstance(module, nn.Module):
        raise LoadError(f"module is a {type(module).__name__}: give an nn.Module or None")
    if batch is None:
        if loss_fn is not None:
            raise LoadError("loss_fn without a batch: give an example of a global batch as well")
        named = planned_step(plan)
        return TrainingStep(module, named.example_args, named.example_kwargs, named.loss_fn), False
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    else:
        args = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    return TrainingStep(module, args, kwargs, loss_fn), False


def _checked_peak(
    plan: Plan,
    traced: TracedStep,
    schedule: Schedule,
    factory: OptimizerFactory,
    spec: OptimizerSpec,
    clip_norm: float | None,
    device: torch.device,
) -> int:
    """Predicted peak with the user's optimizer, before anything is allocated.

    Raises
    ------
    OptimizerRefusedError
        The optimizer is not element-wise, or its peak is above the plan's limit.
    """
    trained = [value for value in traced.graph.parameters if value.trainable]
    dimensions = {value.name: len(value.spec.shape) for value in trained}
    check_element_wise(factory, dimensions, device)
    per_element = {}
    for value in trained:
        dtype = value.spec.dtype
        if dtype not in per_element:
            kept = spec.keeps_master(dtype)
            own = torch.float32 if kept else getattr(torch, dtype)
            found = element_bytes(factory, dimensions, value.name, own, device)
            # The master copy is state; the gradient is copied to its dtype.
            extra = _MASTER_BYTES if kept else 0
            workspace = found.workspace + extra
            if clip_norm is not None:
                workspace = max(workspace, value.spec.item_bytes)
            per_element[dtype] = ElementBytes(found.state + extra, workspace)
    order = update_order(make_optimizer(factory, list(stand_ins(dimensions, device).items())), clip_norm)
    peak = predicted_peak(traced.graph, schedule, MeasuredOptimizer(spec, per_element), order)
    named = getattr(getattr(factory, "func", factory), "__name__", "this optimizer")
    message = excess_message(plan, peak, f"{named} ({order.value})")
    limit = plan.decision.options.limit_bytes
    if message and limit is not None and peak > limit:
        raise OptimizerRefusedError(
            f"{message} and {peak - limit} more than its limit of {limit} allows: plan with the memory, or for an "
            "optimizer with as much state"
        )
    if message and dist.get_rank() == 0:
        warnings.warn(message, MemoryWarning, stacklevel=3)
    return peak
