"""Memory that operators hold while they run, beside arguments and results, by the record of CUDA's allocator."""

from __future__ import annotations

from collections import defaultdict

import torch

from planner.graph.operator_graph import OperatorGraph
from planner.schedule.instructions import Compute, Schedule
from runtime.operators.instruction_clock import InstructionClock

LEAST = 2**12
"""Bytes that are worth a line."""


class ScratchClock(InstructionClock):
    """Notes in the place of times how far the allocator's peak rose above what was there before.

    Parameters
    ----------
    count
        Instructions of the schedule.
    device
        A CUDA device.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__(count, device)
        self.bytes = [0] * count
        self._before = 0

    def begin(self) -> None:
        """Begin a step."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def tick(self, position: int) -> None:
        """Note what the instruction at ``position`` held."""
        risen = torch.cuda.max_memory_allocated(self._device) - self._before
        self.bytes[position] = max(self.bytes[position], risen)
        self._before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        """End a step."""


def by_operator(graph: OperatorGraph, schedule: Schedule, clock: ScratchClock) -> dict[str, int]:
    """Most bytes beside arguments and results, by operator and shapes of its arguments, where there were any.

    Every tensor is whole, as in the plan of one device.
    """
    found: dict[str, int] = defaultdict(int)
    for entry, risen in zip(schedule.instructions, clock.bytes, strict=True):
        if not isinstance(entry, Compute):
            continue
        operator = graph.operators[entry.operator]
        made = (schedule.buffers[output] for output in entry.outputs if output is not None)
        held = risen - sum(graph.values[buffer.value].spec.nbytes for buffer in made)
        if held >= LEAST:
            shapes = (graph.values[value].spec.shape for value in operator.inputs)
            name = f"{operator.target} " + ", ".join("x".join(map(str, shape)) for shape in shapes)
            found[name] = max(found[name], held)
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))
