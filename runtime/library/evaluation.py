"""The forward part of a plan's schedule, as a step whose only result is the loss."""

from __future__ import annotations

from dataclasses import replace

from planner.graph.operator_graph import OutputRole
from planner.schedule.instructions import Compute, Free, Instruction, Reshard, Schedule, Wait, creates, reads
from planner.strategies.traced_step import TracedStep
from planner.torch_adapter.local.evaluation import evaluation_call
from runtime.library.errors import LoadError


def evaluation_step(traced: TracedStep, schedule: Schedule) -> tuple[TracedStep, Schedule]:
    """Instructions that the loss depends on, with dropout off and running statistics in the place of the batch's.

    Every buffer has the placement that the plan gives it, and none lives longer than in a training step.

    Raises
    ------
    LoadError
        The forward draws random numbers in another operator than dropout.
    """
    graph = traced.graph
    at, output = next((at, entry) for at, entry in enumerate(graph.outputs) if entry.role is OutputRole.LOSS)
    loss = schedule.results[at]
    kept = _needed(schedule, loss)
    calls = list(traced.calls)
    for index in {entry.operator for entry in kept if isinstance(entry, Compute)}:
        operator = graph.operators[index]
        call = evaluation_call(traced.calls[index], len(operator.inputs))
        if call is None:
            raise LoadError(
                f"evaluation: {operator.identity} draws random numbers and is no dropout; evaluate exported weights "
                "in a module of your own"
            )
        calls[index] = call
    forward = replace(schedule, instructions=_with_frees(kept, {*schedule.inputs, loss}), results=(loss,))
    return replace(traced, graph=replace(graph, outputs=(output,)), calls=tuple(calls)), forward


def _needed(schedule: Schedule, result: int) -> list[Instruction]:
    """Instructions that make a buffer, in order, without frees."""
    needed = {result}
    found: list[Instruction] = []
    for entry in reversed(schedule.instructions):
        if isinstance(entry, Free):
            continue
        if needed.intersection(creates(entry)) or (isinstance(entry, Wait) and entry.buffer in needed):
            needed.update(reads(entry))
            found.append(entry)
    return found[::-1]


def _with_frees(instructions: list[Instruction], kept: set[int]) -> tuple[Instruction, ...]:
    """Free buffers that are not kept after their last use; an overlapped resharding uses its source up to its wait."""
    sources = {entry.target: entry.source for entry in instructions if isinstance(entry, Reshard) and entry.overlapped}
    last: dict[int, int] = {}
    for at, entry in enumerate(instructions):
        used = [*reads(entry), *creates(entry)]
        if isinstance(entry, Wait) and entry.buffer in sources:
            used.append(sources[entry.buffer])
        last.update(dict.fromkeys(used, at))
    frees: dict[int, list[int]] = {}
    for buffer, at in last.items():
        if buffer not in kept:
            frees.setdefault(at, []).append(buffer)
    found: list[Instruction] = []
    for at, entry in enumerate(instructions):
        found.append(entry)
        if at in frees:
            found.append(Free(tuple(sorted(frees[at]))))
    return tuple(found)
