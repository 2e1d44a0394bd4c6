"""Times of single instructions on one rank, taken while a plan runs."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray


class InstructionClock:
    """Measures how long each instruction of a schedule takes, from the end of the one before it.

    An instruction's time holds its dispatch, the release of what it used last, and its wait for other ranks.

    Parameters
    ----------
    count
        Instructions of the schedule.
    device
        Device of the rank.
    """

    more_steps = 0
    """Steps that it has to see after those of the run."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._device = device
        self._now: NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._last = 0
        self._steps: list[NDArray[np.int64]] = []

    def begin(self) -> None:
        """Begin a step: the first instruction starts now."""
        self._now = np.zeros(self._count, dtype=np.int64)
        self._last = time.perf_counter_ns()

    def tick(self, position: int) -> None:
        """Note that the instruction at ``position`` has ended."""
        now = time.perf_counter_ns()
        self._now[position] += now - self._last
        self._last = now

    def end(self) -> None:
        """End a step."""
        self._steps.append(self._now)

    def typical(self) -> tuple[int, ...]:
        """Median nanoseconds of each instruction over the steps after the first, or of the only one."""
        steps = self._steps[1:] or self._steps
        return tuple(np.median(np.stack(steps), axis=0).astype(np.int64).tolist())
