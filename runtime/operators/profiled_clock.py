"""Times of single instructions on CUDA, by torch's profiler."""

from __future__ import annotations

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from runtime.operators.instruction_clock import InstructionClock

_PROFILED = 2
_NAME = "instruction "


def clock_of(count: int, device: torch.device, steps: int) -> InstructionClock:
    """A clock for the instructions of a schedule on a device, in a run of so many steps."""
    return ProfiledClock(count, device, steps) if device.type == "cuda" else InstructionClock(count, device)


class ProfiledClock(InstructionClock):
    """Times of the kernels that each instruction starts, in two steps whose launches take longer for it.

    Between events on the stream passes the time of launches wherever these take longer than their kernels. On a CPU the
    times are those of operators. Updates that one kernel makes count for the last of them.

    Parameters
    ----------
    count
        Instructions of the schedule.
    device
        Device of the process.
    after
        Steps before these two, whose times the profiler does not touch.
    """

    more_steps = _PROFILED

    def __init__(self, count: int, device: torch.device, after: int = 0) -> None:
        super().__init__(count, device)
        self._after, self._begun = after, 0
        self._positions: list[int] = []
        self._profiler: profile | None = None
        self._range: record_function | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._begun += 1
        if not self._after < self._begun <= self._after + _PROFILED:
            return
        self._positions = []
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
