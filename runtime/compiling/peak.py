"""Peak and time of a step as they were, and beside those that a plan predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import torch

from planner.common.units import format_bytes, format_seconds
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


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """One step as it ran, beside what its plan predicted; shows itself in a notebook.

    Parameters
    ----------
    limit
        Bytes that were allowed.
    predicted, measured
        Bytes at the fullest moment: parameters, inputs and the optimizer's state, and beyond these what was planned,
        or allocated.
    predicted_seconds, seconds
        Of the step, as for :class:`MeasuredStep`.
    rates
        Name of the cluster whose rates the prediction has; the seconds are comparable where it is this device.
    """

    limit: int
    predicted: int
    measured: int
    predicted_seconds: float
    seconds: float
    rates: str

    def __str__(self) -> str:
        return (
            f"peak predicted {format_bytes(self.predicted)}, measured {format_bytes(self.measured)}, "
            f"limit {format_bytes(self.limit)}; a step predicted {format_seconds(self.predicted_seconds)} "
            f"(rates of {self.rates}), measured {format_seconds(self.seconds)}"
        )

    def _repr_html_(self) -> str:
        rows = (
            ("", "predicted", "measured", "limit"),
            ("peak", format_bytes(self.predicted), format_bytes(self.measured), format_bytes(self.limit)),
            (f"step ({self.rates})", format_seconds(self.predicted_seconds), format_seconds(self.seconds), ""),
        )
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


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
