"""The forward part of a plan's schedule, as a step whose only result is the loss."""

from __future__ import annotations

from dataclasses import replace

from planner.common.root_name import shown
from planner.graph.operator_graph import OutputRole
from planner.schedule.frees import with_frees
from planner.schedule.instructions import Compute, Free, Instruction, Reshard, Schedule, Wait, buckets, creates, reads
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
                f"evaluation: {shown(operator.identity)} draws random numbers and is no dropout; evaluate exported "
                "weights in a module of your own"
            )
        calls[index] = call
    forward = replace(schedule, instructions=with_frees(kept, {*schedule.inputs, loss}), results=(loss,))
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
    return _joined_anew(schedule, found[::-1])


def _joined_anew(schedule: Schedule, instructions: list[Instruction]) -> list[Instruction]:
    """A part of the instructions, in which the first part of each bucket that is left is joined to none."""
    entries = schedule.instructions
    bucket_of = {creates(entries[at]): bucket for bucket in buckets(entries) for at in bucket}
    begun: set[range] = set()
    found: list[Instruction] = []
    for entry in instructions:
        bucket = bucket_of.get(creates(entry)) if isinstance(entry, Reshard) else None
        if isinstance(entry, Reshard) and bucket is not None:
            found.append(replace(entry, joined=bucket in begun))
            begun.add(bucket)
        else:
            found.append(entry)
    return found
