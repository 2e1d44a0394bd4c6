"""Kernels of a step on CUDA, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from planner.models.references import TrainingStep
from runtime.gpu_check.outcomes import Figures
from runtime.gpu_check.training import Subject, fresh_memory
from runtime.measure.steps import Training

_MOST = 40


def kernels_of(subject: Subject, make: Callable[[TrainingStep], Training]) -> Figures:
    """Milliseconds of the device by kernel with how often it ran, those that take longest, in the third step."""
    fresh_memory(subject.device)
    step, batches = subject.step()
    training = make(step)
    for number in range(2):
        training.step(batches.of_step(number))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        training.step(batches.of_step(2))
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    ran = [event for event in events if event.self_device_time_total]
    return {
        "milliseconds": sum(event.self_device_time_total for event in ran) / 1e3,
        "count": sum(event.count for event in ran),
        "longest": {event.key[:160]: [event.self_device_time_total / 1e3, event.count] for event in ran[:_MOST]},
    }
