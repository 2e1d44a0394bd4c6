"""Measurement of training steps: memory on the first, time on the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from planner.torch_adapter.meters.storage_meter import StorageMeter
from runtime.measure.batches import Batches
from runtime.measure.memory_meter import MemoryMeter, resident_set_peak_bytes


class Training(Protocol):
    """One rank's part of a training: that of an operator plan, or that of a layer plan."""

    def resident_tensors(self) -> list[Tensor]:
        """Tensors that live on the device between steps."""

    def step(
        self,
        batch: Mapping[str, Tensor],
        meter: MemoryMeter | None = None,
        on_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> float:
        """Forward, backward and optimizer update; a collective of all ranks.

        Parameters
        ----------
        batch
            Global tensors of the step by name.
        meter
            Meters the step's memory.
        on_gradients
            Called with this rank's gradients by name before the updates; not metered.

        Returns
        -------
        float
            The loss of the whole batch.
        """


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurements of one rank.

    Parameters
    ----------
    losses
        Loss of each step.
    peak_bytes
        Most bytes of tensors alive at once; on CPU seen at operators of the first step.
    host_peak_bytes
        Most bytes of offloaded tensors in host memory at once, in the first step.
    resident_set_bytes
        Largest resident set of the process.
    timed_steps
        Seconds of each step after the first.
    reserved_peak_bytes, allocation_retries
        Of CUDA's allocator over all steps, see :class:`MemoryMeter`; None elsewhere.
    """

    losses: tuple[float, ...]
    peak_bytes: int
    host_peak_bytes: int
    resident_set_bytes: int
    timed_steps: tuple[float, ...]
    reserved_peak_bytes: int | None = None
    allocation_retries: int | None = None

    @property
    def step_seconds(self) -> float | None:
        """Median of the timed steps; None with one step."""
        return median(self.timed_steps) if self.timed_steps else None


def train_and_measure(
    training: Training,
    batches: Batches,
    steps: int,
    device: torch.device,
    on_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
    storages: StorageMeter | None = None,
) -> Measurement:
    """Train ``steps`` steps; the first is metered, the others are timed. A collective of all ranks.

    Parameters
    ----------
    training
        This rank's part, at its initial state.
    batches
        Global batches.
    steps
        Number of steps, at least 1.
    device
        Device of the rank.
    on_gradients
        Called with the local gradients of the first step.
    storages
        As :class:`MemoryMeter` takes it.
    """
    losses: list[float] = []
    seconds: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # what loading held is not of the step
    meter = MemoryMeter(device, training.resident_tensors(), storages)
    for number in range(steps):
        batch = batches.of_step(number)
        if number == 0:
            losses.append(training.step(batch, meter, on_gradients))
            continue
        dist.barrier()
        started = time.perf_counter()
        # Reading the loss waits for the device; the updates after it are waited for by hand.
        losses.append(training.step(batch))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return Measurement(
        tuple(losses),
        meter.peak_bytes,
        meter.host_peak_bytes,
        resident_set_peak_bytes(),
        tuple(seconds),
        meter.reserved_peak_bytes,
        meter.allocation_retries,
    )
