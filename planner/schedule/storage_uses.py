"""Uses of each storage of a schedule in forward and in backward, on which offloading is decided."""

from __future__ import annotations

from planner.common.root_name import shown
from planner.graph.operator_graph import OperatorGraph, Phase
from planner.schedule.instructions import Compute, Free, Reshard, Schedule, creates, reads


class StorageUses:
    """Uses of the storages of a schedule without offload; a view uses the storage that it aliases.

    Backward begins behind the last first execution of a forward operator, views aside.

    Parameters
    ----------
    graph, schedule
        The traced step and a correct schedule of it.

    Attributes
    ----------
    boundary
        Position of the first instruction of backward.
    root
        Per buffer, the buffer that owns its storage.
    creator
        Per buffer, the position of the instruction that creates it; -1 for inputs.
    last_forward, first_backward
        Position of the last use (creation included) in forward and of the first in backward, by owner.
    returned
        Owners of storages that results of the step alias.
    """

    def __init__(self, graph: OperatorGraph, schedule: Schedule) -> None:
        self._graph = graph
        self.boundary = _backward_begin(graph, schedule)
        self.root = list(range(len(schedule.buffers)))
        self.creator = [-1] * len(schedule.buffers)
        self.last_forward: dict[int, int] = {}
        self.first_backward: dict[int, int] = {}
        self._first_execution: dict[int, Compute] = {}
        for at, instruction in enumerate(schedule.instructions):
            if isinstance(instruction, Free):
                continue
            if isinstance(instruction, Compute):
                self._follow(instruction)
            if isinstance(instruction, Reshard) and instruction.in_place:
                self.root[instruction.target] = self.root[instruction.source]
            for buffer in creates(instruction):
                self.creator[buffer] = at
            for buffer in (*reads(instruction), *creates(instruction)):
                if at < self.boundary:
                    self.last_forward[self.root[buffer]] = at
                else:
                    self.first_backward.setdefault(self.root[buffer], at)
        self.returned = {self.root[buffer] for buffer in schedule.results}

    def first_buffer(self, value: int) -> int | None:
        """Buffer of a value as its operator's first execution made it; None if no operator of its own storage did."""
        entry = self._graph.values[value]
        execution = None if entry.producer is None else self._first_execution.get(entry.producer)
        return None if execution is None else execution.outputs[entry.output_index]

    def refusal(self, value: int) -> str:
        """Reason why the first buffer of a value cannot be offloaded until backward, or an empty string."""
        name, buffer = shown(self._graph.values[value].name), self.first_buffer(value)
        if buffer is None:
            return f"{name} is not an output of an operator that owns its storage"
        if buffer in self.returned:
            return f"{name} is part of a result of the step"
        if buffer not in self.last_forward or buffer not in self.first_backward:
            return f"{name} is not made in forward and used again in backward"
        return ""

    def _follow(self, instruction: Compute) -> None:
        if self._graph.operators[instruction.operator].is_view:
            for output in creates(instruction):
                self.root[output] = self.root[instruction.inputs[0]]
        elif not instruction.recompute:
            self._first_execution[instruction.operator] = instruction


def behind(schedule: Schedule, at: int) -> int:
    """Position behind an instruction and the frees that follow it."""
    at += 1
    while at < len(schedule.instructions) and isinstance(schedule.instructions[at], Free):
        at += 1
    return at


def _backward_begin(graph: OperatorGraph, schedule: Schedule) -> int:
    last = -1
    for at, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Compute) and not instruction.recompute:
            operator = graph.operators[instruction.operator]
            if operator.phase is Phase.FORWARD and not operator.is_view:
                last = at
    return last + 1
