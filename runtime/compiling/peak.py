"""Peak of a step as torch's allocator saw it, beside the predicted one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from planner.torch_adapter.meters.allocations import most_allocated


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step as it ran.

    Parameters
    ----------
    grown
        Bytes at the fullest moment beyond those at its start.
    seconds
        Time of the step. On CPUs the recording of allocations is part of it.
    """

    grown: int
    seconds: float


def measure_step(step: Callable[[], object]) -> MeasuredStep:
    """Run a step and record what it allocates, in all threads.

    Parameters
    ----------
    step
        Forward and backward; gradients should be None before it, as ``zero_grad`` leaves them.

    Returns
    -------
    MeasuredStep
        On CUDA of the current device, whose statistics of peaks start anew.

    Raises
    ------
    RuntimeError
        On CPUs, a profiler is on already.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, started = torch.cuda.memory_allocated(), time.perf_counter()
        step()
        torch.cuda.synchronize()
        return MeasuredStep(torch.cuda.max_memory_allocated() - before, time.perf_counter() - started)
    seconds = 0.0

    def timed() -> object:
        nonlocal seconds
        started = time.perf_counter()
        result = step()
        seconds = time.perf_counter() - started
        return result

    return MeasuredStep(most_allocated(timed), seconds)
