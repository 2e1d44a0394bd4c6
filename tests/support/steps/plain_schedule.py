"""Schedules that follow the graph's own order with every tensor replicated: the simplest lawful plan."""

from __future__ import annotations

from planner.graph.operator_graph import OperatorGraph, OutputRole
from planner.graph.placement import replicated
from planner.schedule.frees import with_frees
from planner.schedule.instructions import Buffer, Compute, Instruction, Schedule, Update


def replicated_schedule(graph: OperatorGraph, mesh: tuple[int, ...]) -> Schedule:
    """Every operator once, in order, replicated on ``mesh``; updates last."""
    whole = replicated(len(mesh))
    buffers: list[Buffer] = []
    buffer_of: dict[int, int] = {}

    def create(value: int) -> int:
        buffers.append(Buffer(value, whole))
        buffer_of[value] = len(buffers) - 1
        return buffer_of[value]

    inputs = tuple(create(value) for value in graph.inputs)
    instructions: list[Instruction] = []
    for operator in graph.operators:
        arguments = tuple(buffer_of[value] for value in operator.inputs)
        outputs = tuple(None if value is None else create(value) for value in operator.outputs)
        instructions.append(Compute(operator.index, arguments, outputs))
    results = tuple(buffer_of[output.value] for output in graph.outputs)
    kept = {*inputs}
    for output, buffer in zip(graph.outputs, results, strict=True):
        if output.role is OutputRole.GRADIENT:
            assert output.of is not None
            instructions.append(Update(buffer_of[output.of], buffer))
        else:
            kept.add(buffer)
    return Schedule(mesh, tuple(buffers), inputs, with_frees(instructions, kept), results)
