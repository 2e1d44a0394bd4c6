"""Check of plans of layers on one device: checkpoints, hidden states and parameters in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan, LayerSettings, StagePlan
from planner.models.references import load_step
from planner.plan.decision import PlannedModel
from planner.torch_adapter.meters.resized_storages import ResizedStorageMeter
from runtime.gpu_check.outcomes import FailedError, Figures, NotRunError
from runtime.gpu_check.training import fresh_memory
from runtime.layers.check import check_model
from runtime.layers.comparison import gradient_error
from runtime.layers.families.registry import model_family
from runtime.layers.mesh import plan_meshes
from runtime.layers.reference import model_reference
from runtime.layers.training import LayerTraining
from runtime.measure.local_shards import reader_of
from runtime.measure.memory_meter import MemoryMeter
from runtime.measure.optimizer import whole_model_optimizer
from runtime.measure.reference import ReferenceRun
from runtime.measure.rounding import GRADIENT_TOLERANCE, LOSS_TOLERANCE, loss_error, worst_of

SETTINGS: dict[str, dict[str, Any]] = {
    "all on the device": {},
    "checkpoints": {"checkpoint": True},
    "hidden states on the host": {"offload_hidden": True},
    "both": {"checkpoint": True, "offload_hidden": True},
    "parameters on the host": {"offload_parameters": True},
    "optimizer state on the host": {"offload_optimizer": True},
}
STEPS = 3
_UPDATED = 1e-3
"""Tolerance of losses after updates, in which AdamW divides rounding by rounding."""


def plans_of_layers(
    device: torch.device,
    batch: int,
    sequence: int,
    layers: int,
    how: Mapping[str, Mapping[str, Any]] = SETTINGS,
) -> Figures:
    """GPT-2 by plans of layers beside the plain module on the same device, in 32 bits: losses, gradients, peaks.

    Raises
    ------
    FailedError
        A step differs by more than rounding.
    NotRunError
        The model's library is not installed.
    """
    if find_spec("transformers") is None:
        raise NotRunError("GPT-2 of transformers is not installed")
    model = PlannedModel(
        source="hf:gpt2", batch=batch, sequence=sequence, dtype="float32", seed=0, layers=layers, dropout=0.0
    )
    figures: Figures = {}
    wrong: list[str] = []
    plain: dict[str, Any] = {}
    for name, settings in how.items():
        blocks = [LayerSettings(name=f"transformer.h.{at}", **settings) for at in range(layers)]
        whole = (LayerSettings(name="embedding"), *blocks, LayerSettings(name="head"))
        plan = LayerPlan(model=model, devices=1, stages=(StagePlan(layers=whole),), optimizer="adamw")
        check_layer_plan(plan)
        if not plain:
            plain = _plain(plan, device)
            figures["plain"] = {"losses": plain["reference"].losses}
        found = _planned(plan, plain, device)
        figures[name] = found
        allowed = {"loss_error": LOSS_TOLERANCE, "gradient_error": GRADIENT_TOLERANCE, "updated_loss_error": _UPDATED}
        if not all(found[figure] <= most for figure, most in allowed.items()):
            wrong.append(name)
    if wrong:
        raise FailedError(f"steps differ from the plain module's: {', '.join(wrong)}", figures)
    return figures


def _plain(plan: LayerPlan, device: torch.device) -> dict[str, Any]:
    """Initial state, batch and the run of the module itself on the device."""
    step = load_step(model_reference(plan), "cpu")
    named = [*step.module.named_parameters(), *step.module.named_buffers()]
    state = {name: tensor.detach().clone() for name, tensor in named}
    batch = {name: tensor for name, tensor in step.example_kwargs.items() if isinstance(tensor, torch.Tensor)}
    module = step.module.to(device)
    optimizer = whole_model_optimizer(plan.optimizer, module)
    losses, gradients = [], {}
    for number in range(STEPS):
        loss = module(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        losses.append(loss.item())
        if number == 0:
            gradients = {name: p.grad.cpu().clone() for name, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
        module.zero_grad(set_to_none=True)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    return {"state": state, "batch": batch, "reference": ReferenceRun(tuple(losses), gradients, {}, scale)}


def _planned(plan: LayerPlan, plain: dict[str, Any], device: torch.device) -> Figures:
    """Training by a plan from the same values."""
    fresh_memory(device)
    step, batch, reference = load_step(model_reference(plan), "meta"), plain["batch"], plain["reference"]
    family = model_family(step)
    check_model(plan, family, batch)
    read, meshes = reader_of(plain["state"]), plan_meshes(plan, device.type)
    training = LayerTraining(plan, family, step.module, meshes, read, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    meter = MemoryMeter(device, training.resident_tensors(), ResizedStorageMeter())
    errors: dict[str, float] = {}

    def compare(gradients: Any) -> None:
        errors.update(gradient_error(gradients, training.stage.origins, reference)[0])

    here = {name: tensor.to(device) for name, tensor in batch.items()}
    losses = [
        training.step(here, meter if number == 0 else None, compare if number == 0 else None) for number in range(STEPS)
    ]
    worst = worst_of(errors)
    return {
        "loss_error": loss_error(losses[0], reference.losses[0]),
        "updated_loss_error": max(map(loss_error, losses, reference.losses)),
        "gradient_error": worst.error,
        "worst_gradient": worst.name,
        "peak_bytes": meter.peak_bytes,
        "host_peak_bytes": meter.host_peak_bytes,
        "losses": losses,
    }
