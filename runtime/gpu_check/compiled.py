"""Check of compiled steps: by torch under its own budgets of activations, and by this backend at the same peaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.torch_adapter.memory_budget import compiled_under
from runtime.compiling.backend import CompileBackend, Engine, compile_backend
from runtime.gpu_check.outcomes import FailedError, Figures
from runtime.gpu_check.steps import SCRATCH, tried
from runtime.gpu_check.training import Subject


def compiled(name: str, device: torch.device, budgets: tuple[float, ...]) -> Figures:
    """Peak and seconds of a step compiled by torch under its budgets, and by this backend at the peaks of these.

    On a CPU the step is partitioned but no code is generated, so that its tensors can be metered.

    Raises
    ------
    FailedError
        A step of this backend needs more than its limit, or has other losses.
    """
    subject = Subject.named(name, device)
    plain = tried(subject, subject.plain)
    engine: Engine = "inductor" if device.type == "cuda" else "eager"
    theirs_by = "inductor" if device.type == "cuda" else "aot_eager_decomp_partition"
    figures: Figures = {"plain": plain, "budgets": {}}
    wrong = []
    for budget in budgets:
        theirs = tried(
            subject, partial(subject.plain, compiled=partial(compiled_under, budget=budget, backend=theirs_by))
        )
        figures["budgets"][str(budget)] = entry = {"torch": theirs}
        if "peak_bytes" not in theirs:
            continue
        limit = theirs["peak_bytes"]
        backend = compile_backend(limit, optimizer=subject.plan.decision.options.optimizer, engine=engine, quiet=True)
        try:
            ours = tried(subject, partial(subject.plain, compiled=partial(_compiled_by, backend)))
        except Exception as error:  # a refusal of one limit leaves the others to be measured
            entry["meshwright"] = {"refused": f"{type(error).__name__}: {error}"}
            wrong.append(f"at {limit} bytes: {error}")
            continue
        plan = backend.plans[0]
        ours |= {"limit_bytes": limit, "predicted_peak_bytes": plan.peak, "plan": str(plan)}
        entry["meshwright"] = ours
        if ours.get("peak_bytes", 0) > limit + SCRATCH:
            wrong.append(f"{ours['peak_bytes']} bytes under a limit of {limit}")
    if wrong:
        raise FailedError("; ".join(wrong), figures)
    return figures


def _compiled_by(backend: CompileBackend, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    made: Any = torch.compile(loss, backend=backend, dynamic=False, fullgraph=True)
    result: Callable[..., Tensor] = made
    return result
