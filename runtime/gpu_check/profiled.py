"""Time of the device by torch's profiler: by kernel of a step, and by instruction of a plan."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from planner.models.references import TrainingStep
from runtime.gpu_check.outcomes import Figures
from runtime.gpu_check.training import Subject
from runtime.measure.steps import Training
from runtime.operators.instruction_clock import InstructionClock

_MOST = 40
_PROFILED = 2
_NAME = "instruction "


class ProfiledClock(InstructionClock):
    """Times of the kernels that each instruction starts, in the second step, whose launches take longer for it.

    On CUDA the time between instructions is that of their launches where these are longer than their kernels. On a CPU
    the time is that of the operators.

    Parameters
    ----------
    count
        Instructions of the schedule.
    device
        Device of the process.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__(count, device)
        self._begun = 0
        self._positions: list[int] = []
        self._profiler: profile | None = None
        self._range: record_function | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._begun += 1
        if self._begun != _PROFILED:
            return
        on_cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *on_cuda])
        self._profiler.start()
        self._enter()

    def tick(self, position: int) -> None:
        """Note that the instruction at ``position`` has been started."""
        if self._profiler is not None:
            self._leave()
            self._positions.append(position)
            self._enter()

    def end(self) -> None:
        """End a step."""
        if self._profiler is None:
            return
        self._leave()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profiler.stop()
        times = np.zeros(self._count, dtype=np.int64)
        for event in self._profiler.events():  # type: ignore[no-untyped-call]
            if event.name.startswith(_NAME) and str(event.device_type).endswith("CPU"):
                at = int(event.name.removeprefix(_NAME))
                spent = event.device_time_total if self._device.type == "cuda" else event.cpu_time_total
                if at < len(self._positions):
                    times[self._positions[at]] += round(spent * 1e3)
        self._steps.append(times)
        self._profiler = None

    def _enter(self) -> None:
        self._range = record_function(f"{_NAME}{len(self._positions)}")
        self._range.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        assert self._range is not None
        self._range.__exit__(None, None, None)


def kernels_of(subject: Subject, make: Callable[[TrainingStep], Training]) -> Figures:
    """Milliseconds of the device by kernel with how often it ran, those that take longest, in the third step."""
    gc.collect()
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
