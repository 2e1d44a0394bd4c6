"""Runs of layer plans on the ranks of a pool, compared with one process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

import torch
import torch.distributed as dist
from support.layer_plan_models import layer_reference

from planner.layer_plan import LayerPlan, LayerSettings, StagePlan
from planner.layer_plan_check import check_layer_plan
from planner.models import ModelReference, load_step
from planner.plan_format import PlannedModel
from planner.torch_adapter.resized_storages import ResizedStorageMeter
from runtime.layer_check import check_model
from runtime.layer_comparison import gradient_error, uncompared
from runtime.layer_families import layer_names, model_family
from runtime.layer_memory import local_tensor
from runtime.layer_mesh import plan_meshes
from runtime.layer_training import LayerTraining
from runtime.memory_meter import MemoryMeter
from runtime.optimizer import whole_model_optimizer
from runtime.reference import ReferenceRun

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
def one_process(reference: ModelReference, optimizer: str, steps: int):
    """Initial state, batch and the run of one process."""
    step = load_step(reference, "cpu")
    module, batch = step.module, dict(step.example_kwargs)
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


def planned_model(name: str, layers: int | None = None) -> PlannedModel:
    return PlannedModel(**asdict(layer_reference(name, layers)))


def names_of(model: PlannedModel) -> tuple[str, ...]:
    return layer_names(ModelReference(**model.model_dump()))


def run_layer_plan_on_rank(text: str, steps: int = 2) -> dict[str, object]:
    """Train by the plan and compare; called on every rank."""
    plan = LayerPlan.model_validate_json(text)
    reference = ModelReference(**plan.model.model_dump())
    state, batch, expected = one_process(reference, plan.optimizer, steps)
    step = load_step(reference, "meta")
    family = model_family(step)
    check_model(plan, family, batch)
    training = LayerTraining(plan, family, step.module, plan_meshes(plan, "cpu"), state, CPU)
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
    worst, compared = found[0]
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


def check_layer_run(pool, plan: LayerPlan) -> list[LayerOutcome]:
    """Run a plan on a pool and hold it to one process."""
    outcomes = [LayerOutcome(**found) for found in pool.run(run_layer_plan_on_rank, plan.model_dump_json())]
    for outcome in outcomes:
        assert outcome.loss_error <= 1e-5, (outcome, plan)
        assert outcome.gradient_error <= 1e-4, (outcome, plan)
        assert outcome.uncompared == [], (outcome, plan)
        assert outcome.updated_loss_error <= 1e-3, (outcome, plan)
    return outcomes


def staged_plan(name: str, *stages: list[dict[str, object]], devices: int, **options) -> LayerPlan:
    """A checked plan from one dictionary of settings for each layer, in stages."""
    model = planned_model(name)
    names = iter(names_of(model))
    made = [tuple(LayerSettings(name=next(names), **settings) for settings in one) for one in stages]
    plan = LayerPlan(model=model, devices=devices, stages=tuple(StagePlan(layers=layers) for layers in made), **options)
    check_layer_plan(plan)
    return plan
