"""Checks of whole steps: plans beside the plain module, time by class of operator, and memory under limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planner.models.references import TrainingStep
from runtime.gpu_check.outcomes import FailedError, Figures, NotRunError
from runtime.gpu_check.plans import SHARES, device_plan, required
from runtime.gpu_check.profiled import kernels_of
from runtime.gpu_check.scratch import ScratchClock, by_operator
from runtime.gpu_check.training import Subject, fresh_memory
from runtime.job.device_memory import DeviceMemoryError, check_device_memory
from runtime.job.launch import run_plan
from runtime.measure.comparison import ReferenceComparison
from runtime.measure.host_arena import host_lifetimes, plan_arena
from runtime.measure.profile import StepProfile
from runtime.measure.reference import ReferenceRun
from runtime.measure.rounding import GRADIENT_TOLERANCE, LOSS_TOLERANCE, loss_error, worst_of
from runtime.measure.steps import Measurement, Training, train_and_measure
from runtime.operators.profiled_clock import ProfiledClock

SCRATCH = 2**24
"""Bytes that kernels may hold beside tensors, as part of a cluster's reserve: reductions hold 4 MiB on an H200."""


def as_the_plain_module(name: str, share: int, device: torch.device) -> Figures:
    """Losses and gradients of a plan beside the plain module's on the same device, in 32 bits.

    Raises
    ------
    FailedError
        They differ by more than rounding.
    """
    plan = required(name, share)
    subject = Subject(plan, device)
    gradients: dict[str, Tensor] = {}
    step, batches = subject.step()
    plain = subject.plain(step)
    expected = train_and_measure(plain, batches, 2, device, lambda found: gradients.update(_copied(found)))
    step, batches = subject.step()
    del plain
    fresh_memory(device)
    planned = subject.planned(plan, step)
    scale = max(float(tensor.abs().max()) for tensor in gradients.values())
    reference = ReferenceRun(expected.losses, gradients, {}, scale)
    errors: dict[str, float] = {}
    comparison = ReferenceComparison(reference, planned.placements, subject.groups)
    found = train_and_measure(planned, batches, 2, device, lambda given: errors.update(comparison.gradients(given)))
    worst, loss = worst_of(errors), loss_error(found.losses[0], expected.losses[0])
    host = plan.decision.predicted.host
    figures: Figures = {
        "loss_error": loss,
        "gradient_error": worst.error,
        "worst_gradient": worst.name,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_host_peak_bytes": host.peak_bytes,
        **memory_of(found),
    }
    if errors.keys() != gradients.keys():
        raise FailedError(f"{name}: gradients of {sorted(errors.keys() ^ gradients.keys())} were not compared", figures)
    if not (loss <= LOSS_TOLERANCE and worst.error <= GRADIENT_TOLERANCE):
        raise FailedError(f"{name}: the plan's step differs from the plain module's", figures)
    pinned = plan_arena(host_lifetimes(subject.traced.graph, subject.schedule(plan))).nbytes
    figures["planned_arena_bytes"] = pinned
    if found.host_peak_bytes > (pinned if device.type == "cuda" else host.peak_bytes):
        raise FailedError(f"{name}: more host memory than planned", figures)
    return figures


def _copied(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in gradients.items()}


def as_one_process(ranks: int, device: torch.device) -> Figures:
    """A run of a plan in 16 bits with dropout on its own processes, compared with one process on the CPU.

    Raises
    ------
    FailedError
        It differs by more than rounding, or needs more memory than its limit.
    NotRunError
        There are fewer devices than ranks.
    """
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        raise NotRunError(f"{ranks} ranks need as many CUDA devices, this machine has {torch.cuda.device_count()}")
    plan = required("gpt2-half" if ranks == 1 else f"gpt2-half-{ranks}")
    report = run_plan(plan, steps=2, check=True, device=device.type)
    figures = report.model_dump(mode="json", exclude={"instruction_ns"})
    if report.failures():
        raise FailedError("; ".join(report.failures()), figures)
    return figures


def by_class(name: str, device: torch.device) -> Figures:
    """Time of a step by class of operator, predicted for the plan's cluster and measured here; and its memory."""
    entry, plan = device_plan(name), required(name)
    check_device_memory(plan.peak_bytes, device)
    subject = Subject.named(name, device)
    schedule = subject.schedule(plan)
    clock = ProfiledClock(len(schedule.instructions), device)
    subject.measure(lambda step: subject.planned(plan, step, clock))
    found = subject.measure(lambda step: subject.planned(plan, step))
    times = clock.typical()
    profile = StepProfile(subject.traced.graph, schedule, np.array([times], dtype=np.int64), None)
    measured = {line.name: line.measured_ns for line in profile.by_kind()}
    kinds = sorted(measured.keys() | entry.predicted_ns.keys(), key=lambda kind: -measured.get(kind, 0))
    return {
        "cluster": plan.decision.options.cluster,
        "predicted_seconds": plan.objective_seconds,
        "measured_seconds": found.step_seconds,
        "kernel_seconds": sum(measured.values()) * 1e-9,
        "kinds": {
            kind: {"predicted_ns": entry.predicted_ns.get(kind, 0), "measured_ns": measured.get(kind, 0)}
            for kind in kinds
        },
        "instruction_ns": list(times),
        "predicted_peak_bytes": plan.peak_bytes,
        **memory_of(found),
        **_of_the_device(found, device),
    }


def operators(name: str, device: torch.device) -> Figures:
    """What operators of a plan held beside tensors, and kernels of its step and of the plain module's."""
    plan = required(name)
    subject = Subject.named(name, device)
    schedule = subject.schedule(plan)
    scratch = ScratchClock(len(schedule.instructions), device)
    subject.measure(lambda step: subject.planned(plan, step, scratch))
    return {
        "scratch_bytes": by_operator(subject.traced.graph, schedule, scratch),
        "kernels": kernels_of(subject, partial(subject.planned, plan)),
        "plain_kernels": kernels_of(subject, subject.plain),
    }


def _of_the_device(found: Measurement, device: torch.device) -> Figures:
    """Bytes in use on the device beside what the allocator reserved: context, libraries, other processes."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    beside = total - free - torch.cuda.memory_reserved(device)
    return {"device_bytes": total, "beside_the_allocator_bytes": beside}


def side_by_side(name: str, device: torch.device) -> Figures:
    """Peak and seconds of plans under limits, and of checkpointed blocks.

    Raises
    ------
    FailedError
        A plan's peak is above its limit, or its losses are not those of the plain module.
    NotRunError
        The model's free plan does not fit on the device.
    """
    entries = {share: device_plan(name, share) for share in SHARES}
    subject = Subject.named(name, device)
    plain = tried(subject, subject.plain)
    figures: Figures = {"free_peak_bytes": entries[SHARES[0]].free_peak_bytes, "plain": plain}
    ours, wrong = {}, []
    for share, entry in entries.items():
        if entry.plan is None:
            ours[str(share)] = {"not_run": entry.refused}
            continue
        try:
            check_device_memory(entry.plan.peak_bytes, device)
        except DeviceMemoryError as error:
            ours[str(share)] = {"not_run": str(error)}
            continue
        found = tried(subject, partial(subject.planned, entry.plan))
        found |= {
            "limit_bytes": entry.limit_bytes,
            "predicted_peak_bytes": entry.plan.peak_bytes,
            "predicted_seconds": entry.plan.objective_seconds,
        }
        ours[str(share)] = found
        wrong += _wrong(f"{name} at {share} %", found, plain, entry.limit_bytes, subject)
    figures["plans"] = ours
    count, on_device = _blocks(subject), device.type == "cuda"
    figures["checkpointed_blocks"] = {
        str(kept): tried(subject, partial(subject.plain, checkpointed=kept))
        for kept in sorted({count * part // 4 for part in (range(1, 5) if on_device else (2, 4))})
    }
    figures["fastest_within"] = {str(share): _fastest(figures, entries[share].limit_bytes) for share in SHARES}
    if wrong:
        raise FailedError("; ".join(wrong), figures)
    return figures


def _blocks(subject: Subject) -> int:
    """Blocks of the model."""
    numbers = [path.split(".")[1] for op in subject.traced.graph.operators if (path := op.module_path)[:7] == "blocks."]
    return 1 + max(map(int, numbers))


def tried(subject: Subject, make: Callable[[TrainingStep], Training]) -> Figures:
    """Figures of a training; where memory does not suffice, that."""
    try:
        found = subject.measure(make)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error)}
    return {"seconds": found.step_seconds, "losses": list(found.losses), **memory_of(found)}


def memory_of(found: Measurement) -> Figures:
    """Bytes that a training needed."""
    return {
        "peak_bytes": found.peak_bytes,
        "reserved_peak_bytes": found.reserved_peak_bytes,
        "allocation_retries": found.allocation_retries,
        "host_peak_bytes": found.host_peak_bytes,
    }


def _wrong(what: str, found: Figures, plain: Figures, limit: int, subject: Subject) -> list[str]:
    """What is wrong with a plan's training."""
    wrong = []
    if found.get("peak_bytes", 0) > limit + SCRATCH:
        wrong.append(f"{what} needed {found['peak_bytes']} bytes, its limit is {limit}")
    if "losses" in found and "losses" in plain:
        dtype = getattr(torch, subject.reference.dtype)
        tolerance = LOSS_TOLERANCE if dtype.itemsize > 2 else 2 * torch.finfo(dtype).eps
        error = loss_error(found["losses"][0], plain["losses"][0])
        if not error <= tolerance:
            wrong.append(f"{what}: the first loss differs from the plain module's by {error:.1e}")
    return wrong


def _fastest(figures: Figures, limit: int) -> Figures:
    """Seconds of the fastest training of each method within a limit and what kernels hold beside; None without one."""
    fastest: Figures = {"limit_bytes": limit}
    for method in ("plans", "checkpointed_blocks"):
        runs: list[dict[str, Any]] = [*figures[method].values()]
        if method == "checkpointed_blocks":
            runs.append(figures["plain"])
        fitting = [run["seconds"] for run in runs if "peak_bytes" in run and run["peak_bytes"] <= limit + SCRATCH]
        fastest[method] = min(fitting, default=None)
    return fastest
