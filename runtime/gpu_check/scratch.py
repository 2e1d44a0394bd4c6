"""Memory that operators hold while they run, beside arguments and results, by the record of CUDA's allocator."""

from __future__ import annotations

from collections import defaultdict

import torch

from planner.graph.operator_graph import OperatorGraph
from planner.schedule.instructions import Compute, Schedule
from runtime.operators.instruction_clock import InstructionClock


class ScratchClock(InstructionClock):
    """Notes in the place of times how far the allocator's peak rose above what was there before and after.

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
        after = torch.cuda.memory_allocated(self._device)
        held = torch.cuda.max_memory_allocated(self._device) - max(self._before, after)
        self.bytes[position] = max(self.bytes[position], held)
        self._before = after
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        """End a step."""


def by_operator(graph: OperatorGraph, schedule: Schedule, clock: ScratchClock) -> dict[str, int]:
    """Most bytes by operator and shapes of its arguments, of those that held any; others by kind of instruction."""
    found: dict[str, int] = defaultdict(int)
    for entry, held in zip(schedule.instructions, clock.bytes, strict=True):
        if not held:
            continue
        name = type(entry).__name__
        if isinstance(entry, Compute):
            operator = graph.operators[entry.operator]
            shapes = (graph.values[value].spec.shape for value in operator.inputs if value is not None)
            name = f"{operator.target} " + ", ".join("x".join(map(str, shape)) for shape in shapes)
        found[name] = max(found[name], held)
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))
