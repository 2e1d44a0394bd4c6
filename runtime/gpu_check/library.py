"""Check of the training library on a device: the user's optimizer, checkpoints, and resuming from them."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import runtime
from planner.models.references import load_step, reference_of
from planner.torch_adapter.tracing.step_module import StepArguments
from runtime.gpu_check.outcomes import FailedError, Figures
from runtime.gpu_check.plans import required

_STEPS, _SAVED = 6, 3


def resumed(device: torch.device) -> Figures:
    """Losses of a training that is saved and resumed, beside one that is not interrupted; fused AdamW and clipping.

    Raises
    ------
    FailedError
        The resumed training has other bits, or the losses do not fall.
    """
    plan = required("gpt2-tiny", 60)
    step = load_step(reference_of(plan.decision.model), "cpu")
    arguments = StepArguments.of(step.module, step.example_args, step.example_kwargs)
    batch = dict(zip(arguments.names, arguments.tensors, strict=True))
    whole, state, _ = _trained(plan, batch, device, 0, _STEPS, None)
    with tempfile.TemporaryDirectory(prefix="meshwright-check-") as folder:
        first, _, _ = _trained(plan, batch, device, 0, _SAVED, Path(folder))
        rest, found, exported = _trained(plan, batch, device, _SAVED, _STEPS, Path(folder))
    different = [name for name, tensor in state.items() if not torch.equal(tensor, found[name])]
    figures: Figures = {"losses": whole, "resumed_losses": first + rest, "different": different, "exported": exported}
    if first + rest != whole or different:
        raise FailedError("a resumed training differs from one that was not interrupted", figures)
    if not whole[-1] < whole[0]:
        raise FailedError("the loss does not fall", figures)
    return figures


def _trained(
    plan: Any, batch: dict[str, Tensor], device: torch.device, begin: int, end: int, folder: Path | None
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of some steps, the values after them, and bytes of the exported file."""
    module = load_step(reference_of(plan.decision.model), "cpu").module
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    step = runtime.load(plan, module, optimizer=optimizer, clip_norm=1.0, device=device, allow_code=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizer, _STEPS)
    if begin and folder is not None:
        step.resume(folder, schedule)
    losses, exported = [], 0
    for _ in range(begin, end):
        losses.append(step(batch).item())
        schedule.step()
    if folder is not None:
        if not begin:
            step.save(folder, schedule)
        file = folder / "trained.safetensors"
        step.export(file)
        exported = file.stat().st_size
    state = {name: _whole(tensor).cpu() for name, tensor in step.state_dict().items()}
    return losses, state, exported


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
