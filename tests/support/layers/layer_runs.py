"""Runs of layer plans on the ranks of a pool, compared with one process."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from functools import cache
from itertools import zip_longest

import torch
import torch.distributed as dist
from support.layers.late_copies import LateCopies
from support.layers.layer_plan_models import layer_names, layer_reference

from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan, LayerSettings, StagePlan
from planner.models.references import ModelReference, load_step, reference_of
from planner.plan.decision import PlannedModel
from planner.torch_adapter.meters.resized_storages import ResizedStorageMeter
from runtime.layers.check import check_model
from runtime.layers.comparison import gradient_error, uncompared
from runtime.layers.families.registry import model_family
from runtime.layers.mesh import plan_meshes
from runtime.layers.reference import model_reference
from runtime.layers.training import LayerTraining
from runtime.measure.local_shards import local_tensor, reader_of
from runtime.measure.memory_meter import MemoryMeter
from runtime.measure.optimizer import whole_model_optimizer
from runtime.measure.reference import ReferenceRun
from runtime.measure.rounding import worst_of

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LayerOutcome:
    """What one rank found: relative errors, whose gradient is worst, the largest error of all losses, and bytes."""

    loss_error: float
    gradient_error: float
    worst: str
    uncompared: list[str]
    updated_loss_error: float
    parameter_bytes: int
    peak_bytes: int
    host_peak_bytes: int


@cache
def one_process(reference: ModelReference, optimizer: str, steps: int, padded: bool = False):
    """Initial state, batch and the run of one process."""
    step = load_step(reference, "cpu")
    module, batch = step.module, dict(step.example_kwargs)
    if padded:
        batch["input_ids"] = with_padding(batch["input_ids"], module.config)
    named = [*module.named_parameters(), *module.named_buffers()]
    state = {name: tensor.detach().clone() for name, tensor in named}
    updater = whole_model_optimizer(optimizer, module)
    losses, gradients = [], {}
    for number in range(steps):
        loss = module(**batch).loss
        loss.backward()
        losses.append(loss.item())
        if number == 0:
            gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        updater.step()
        module.zero_grad(set_to_none=True)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    return state, batch, ReferenceRun(tuple(losses), gradients, {}, scale)


def with_padding(tokens, config):
    """Tokens of which every third is padding, and one that has its place in the other half of the vocabulary."""
    tokens = tokens.clone()
    tokens[:, ::3] = config.pad_token_id
    tokens[:, 1] = (config.pad_token_id + config.vocab_size // 2) % config.vocab_size
    return tokens


def planned_model(name: str, layers: int | None = None, **options) -> PlannedModel:
    return PlannedModel(**asdict(layer_reference(name, layers, **options)))


def names_of(model: PlannedModel) -> tuple[str, ...]:
    return layer_names(reference_of(model))


def training_of(plan: LayerPlan, state, batch) -> LayerTraining:
    step = load_step(model_reference(plan), "meta")
    family = model_family(step)
    check_model(plan, family, batch)
    return LayerTraining(plan, family, step.module, plan_meshes(plan, "cpu"), reader_of(state), CPU)


def run_layer_plan_on_rank(text: str, padded: bool = False, steps: int = 2) -> dict[str, object]:
    """Train by the plan and compare; called on every rank."""
    plan = LayerPlan.model_validate_json(text)
    state, batch, expected = one_process(model_reference(plan), plan.optimizer, steps, padded)
    training = training_of(plan, state, batch)
    found = []
    meter = MemoryMeter(CPU, training.resident_tensors(), ResizedStorageMeter())
    losses = [
        training.step(
            batch,
            meter if number == 0 else None,
            (lambda gradients: found.append(gradient_error(gradients, training.stage.origins, expected)))
            if number == 0
            else None,
        )
        for number in range(steps)
    ]
    gradient_errors, compared = found[0]
    worst = worst_of(gradient_errors)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, compared)
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, expected.losses, strict=True)]
    outcome = LayerOutcome(
        loss_error=errors[0],
        gradient_error=worst.error,
        worst=worst.name,
        uncompared=uncompared(every, expected),
        updated_loss_error=max(errors),
        parameter_bytes=sum(local_tensor(parameter).nbytes for parameter in training.parameters().values()),
        peak_bytes=meter.peak_bytes,
        host_peak_bytes=meter.host_peak_bytes,
    )
    return asdict(outcome)  # the pool's ranks know this module by another name


def check_layer_run(pool, plan: LayerPlan, padded: bool = False, coarser: float = 1.0) -> list[LayerOutcome]:
    """Run a plan on a pool and hold it to one process; tolerances are those of 32 bits, times `coarser`."""
    outcomes = [LayerOutcome(**found) for found in pool.run(run_layer_plan_on_rank, plan.model_dump_json(), padded)]
    for outcome in outcomes:
        assert outcome.loss_error <= 1e-5 * coarser, (outcome, plan)
        assert outcome.gradient_error <= 1e-4 * coarser, (outcome, plan)
        assert outcome.uncompared == [], (outcome, plan)
        assert outcome.updated_loss_error <= 1e-3 * coarser, (outcome, plan)
    return outcomes


def gradients_on_rank(text: str) -> tuple[float, dict[str, list[float]]]:
    """Loss of one step of a plan, and its gradients as they are on this rank."""
    plan = LayerPlan.model_validate_json(text)
    step = load_step(model_reference(plan), "cpu")
    state = dict([*step.module.named_parameters(), *step.module.named_buffers()])
    training = training_of(plan, {name: tensor.detach() for name, tensor in state.items()}, step.example_kwargs)
    found = {}
    loss = training.step(
        step.example_kwargs,
        on_gradients=lambda gradients: found.update(
            {path: local_tensor(gradient).flatten().tolist() for path, gradient in gradients.items()}
        ),
    )
    return loss, found


def staged_plan(
    name: str,
    *stages: list[dict[str, object]],
    devices: int,
    model: PlannedModel | None = None,
    sizes: tuple[int, ...] = (),
    **options,
) -> LayerPlan:
    """A checked plan from one dictionary of settings for each layer, in stages, equally large or of these sizes."""
    model = model or planned_model(name)
    names = iter(names_of(model))
    made = [tuple(LayerSettings(name=next(names), **settings) for settings in one) for one in stages]
    plan = LayerPlan(
        model=model,
        devices=devices,
        stages=tuple(StagePlan(layers=layers, devices=size) for layers, size in zip_longest(made, sizes)),
        **options,
    )
    check_layer_plan(plan)
    return plan


def failed_step_on_rank(text: str) -> tuple[list[str], int]:
    """Log of hidden states' copies in a step whose backward fails half way, and tensors that were freed too early."""
    plan = LayerPlan.model_validate_json(text)
    state, batch, _ = one_process(model_reference(plan), plan.optimizer, 1)
    training, copies = training_of(plan, state, batch), LateCopies()
    training.stage.hidden._copies = copies
    training.step(batch)
    copies.log.clear()

    def fail(gradient):
        raise ZeroDivisionError

    units = training.stage.module.units
    units[len(units) // 2].register_forward_hook(lambda *given: given[2][0].register_hook(fail) and None)
    try:
        training.step(batch)
    except ZeroDivisionError:
        gc.collect()
        return copies.log, copies.freed_early
    raise AssertionError("the step did not fail")
