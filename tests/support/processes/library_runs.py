"""Training through the library on the ranks of a pool, and the same training in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.steps.planned_steps import real_step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import runtime
from planner.layers.plan.document import LayerPlan
from planner.plan.document import Plan
from planner.torch_adapter.tracing.step_module import StepArguments, step_loss

EPSILON = 1e-4
"""Far above the rounding of gradients that are zero, such as those of a key's bias: its sign would be a whole step."""

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=EPSILON)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": ADAMW,
    "foreach": partial(ADAMW, foreach=True),
    "fused": partial(ADAMW, fused=True),
    "nesterov": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, eps=EPSILON),
}
STEPS = 3


@dataclass(frozen=True)
class Trained:
    """Losses of the steps, the loss in evaluation after them, norms of gradients, and all tensors."""

    losses: list[float]
    evaluated: float
    norms: list[float]
    tensors: dict[str, Tensor]
    peak_bytes: int = 0


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)


def batches(name: str, count: int = STEPS) -> list[dict[str, Tensor]]:
    """Different global batches, by the names of the step's arguments."""
    step = real_step(name)
    arguments = StepArguments.of(step.module, step.example_args, step.example_kwargs)
    found = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        found.append(
            {
                key: tensor[torch.randperm(len(tensor), generator=generator)]
                if tensor.dtype == torch.int64
                else tensor + torch.randn(tensor.shape, generator=generator)
                for key, tensor in zip(arguments.names, arguments.tensors, strict=True)
            }
        )
    return found


def train_alone(name: str, optimizer: str = "adamw", clip_norm: float | None = None) -> Trained:
    """Eager training in one process by torch alone."""
    step = real_step(name)
    module = step.module
    arguments = StepArguments.of(module, step.example_args, step.example_kwargs)
    updater = OPTIMIZERS[optimizer]([p for p in module.parameters() if p.requires_grad])
    scheduler = scheduler_of(updater)
    losses, norms = [], []

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        args, kwargs = arguments.rebuild(batch[key] for key in arguments.names)
        return step_loss(module, args, kwargs, step.loss_fn)

    for batch in batches(name):
        loss = loss_of(batch)
        loss.backward()
        if clip_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip_norm)))
        updater.step()
        scheduler.step()
        updater.zero_grad()
        losses.append(loss.item())
    module.eval()
    evaluated = loss_of(batches(name)[0]).item()
    tensors = {key: value.detach() for key, value in module.state_dict().items()}
    return Trained(losses, evaluated, norms, tensors)


def train_on_rank(
    plan: Plan | LayerPlan,
    name: str,
    optimizer: str = "adamw",
    clip_norm: float | None = None,
    shares: str = "global",
    folder: Path | None = None,
) -> tuple[Any, ...]:
    """The same through the library, on one rank: fields of :class:`Trained`; tensors as exported into a folder."""
    module = real_step(name).module
    if torch.distributed.get_rank():
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()  # the values of rank 0 count
    step = runtime.load(plan, module, optimizer=OPTIMIZERS[optimizer], clip_norm=clip_norm, device="cpu")
    scheduler = scheduler_of(step.optimizer)
    losses, norms = [], []
    for batch in batches(name):
        if shares == "rows":
            rows = step.shares.rows
            batch = {key: tensor[rows.start : rows.stop] for key, tensor in batch.items()}
        losses.append(step(batch).item())
        scheduler.step()
        if step.gradient_norm is not None:
            norms.append(float(step.gradient_norm))
    evaluated = step.evaluate(batches(name)[0]).item()
    tensors = full_tensors(step.state_dict())
    if folder is not None:
        exported = load_file(step.export(folder / f"{name}.safetensors"))
        for key, tensor in tensors.items():
            whole, _, part = key.rstrip("]").partition("[")
            cuts = [slice(*map(int, cut.split(":"))) if cut != ":" else slice(None) for cut in part.split(", ") if cut]
            assert torch.equal(exported[whole][tuple(cuts)], tensor), key
        tensors = exported
    return losses, evaluated, norms, tensors, step.peak_bytes


def full_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Whole tensors of a state dict of DTensors; a collective of all ranks."""
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in state.items()
    }
