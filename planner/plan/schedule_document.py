"""Schedules in plan files: conversion between positions in a graph and stable names.

A plan holds the identities of the operators and values that its schedule uses, and the schedule points into
these lists. So a plan fits every graph that has these operators, however that graph numbers them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from planner.common.plan_error import PlanError
from planner.common.root_name import shown
from planner.graph.operator_graph import OperatorGraph, ValueRole
from planner.graph.placement import Placement
from planner.plan.decision import (
    ComputeStep,
    Decision,
    FreeStep,
    InputValue,
    OutputValue,
    PlanInstruction,
    PlanSchedule,
    ReshardStep,
    TransferStep,
    UpdateStep,
    WaitStep,
)
from planner.schedule.instructions import (
    Buffer,
    Compute,
    Free,
    Instruction,
    Offload,
    Prefetch,
    Reshard,
    Schedule,
    Update,
    Wait,
)

_Entry = TypeVar("_Entry")
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class EncodedSchedule:
    """A schedule and the names that it points to."""

    operators: tuple[str, ...]
    values: tuple[InputValue | OutputValue, ...]
    schedule: PlanSchedule


@dataclass
class _Table(Generic[_Key]):
    """Entries in the order in which they are first used, and their positions."""

    positions: dict[_Key, int] = field(default_factory=dict)

    def position(self, entry: _Key) -> int:
        return self.positions.setdefault(entry, len(self.positions))


def encode_schedule(graph: OperatorGraph, schedule: Schedule) -> EncodedSchedule:
    """Write a schedule with stable names; equal schedules give equal encodings."""
    operators: _Table[int] = _Table()
    values: _Table[int] = _Table()
    placements: _Table[Placement] = _Table()
    buffers = tuple((values.position(b.value), placements.position(b.placement)) for b in schedule.buffers)

    def encoded(instruction: Instruction) -> PlanInstruction:
        match instruction:
            case Compute(operator, inputs, outputs, recompute):
                op: Literal["compute", "recompute"] = "recompute" if recompute else "compute"
                return ComputeStep(op=op, operator=operators.position(operator), inputs=inputs, outputs=outputs)
            case Reshard(source, target, path, overlapped, joined, in_place):
                positions = tuple(map(placements.position, path))
                start: Literal["start in place", "start"] = "start in place" if in_place else "start"
                begin: Literal["join", "start in place", "start", "reshard"]
                begin = "join" if joined else start if overlapped else "reshard"
                return ReshardStep(op=begin, source=source, target=target, path=positions)
            case Wait(buffer):
                return WaitStep(op="wait", buffer=buffer)
            case Update(parameter, gradient):
                return UpdateStep(op="update", parameter=parameter, gradient=gradient)
            case Free(freed):
                return FreeStep(op="free", buffers=freed)
            case Offload(source, target):
                return TransferStep(op="offload", source=source, target=target)
            case Prefetch(source, target):
                return TransferStep(op="prefetch", source=source, target=target)

    instructions = tuple(map(encoded, schedule.instructions))
    references = tuple(_reference(graph, index, operators) for index in values.positions)
    return EncodedSchedule(
        operators=tuple(graph.operators[index].identity for index in operators.positions),
        values=references,
        schedule=PlanSchedule(
            mesh=schedule.mesh,
            placements=tuple(placements.positions),
            buffers=buffers,
            inputs=schedule.inputs,
            instructions=instructions,
            results=schedule.results,
        ),
    )


def decode_schedule(decision: Decision, graph: OperatorGraph) -> Schedule:
    """Find the schedule of a plan in a traced graph, by identities.

    Raises
    ------
    PlanError
        The graph lacks an operator or a value that the plan names, or the plan points past its own lists.
    """
    operators = _operator_positions(decision, graph)
    values = tuple(_value_positions(decision, graph, operators))
    plan = decision.schedule

    def placement(position: int) -> Placement:
        return _entry(plan.placements, position, "placement")

    def decoded(step: PlanInstruction) -> Instruction:
        match step:
            case ComputeStep():
                index = _entry(operators, step.operator, "operator")
                return Compute(index, step.inputs, step.outputs, step.op == "recompute")
            case ReshardStep():
                path = tuple(map(placement, step.path))
                ways = step.op != "reshard", step.op == "join", step.op == "start in place"
                return Reshard(step.source, step.target, path, *ways)
            case WaitStep():
                return Wait(step.buffer)
            case UpdateStep():
                return Update(step.parameter, step.gradient)
            case FreeStep():
                return Free(step.buffers)
            case TransferStep():
                return (Offload if step.op == "offload" else Prefetch)(step.source, step.target)

    return Schedule(
        mesh=plan.mesh,
        buffers=tuple(Buffer(_entry(values, value, "value"), placement(where)) for value, where in plan.buffers),
        inputs=plan.inputs,
        instructions=tuple(map(decoded, plan.instructions)),
        results=plan.results,
    )


def _reference(graph: OperatorGraph, index: int, operators: _Table[int]) -> InputValue | OutputValue:
    value = graph.values[index]
    if value.producer is not None:
        return OutputValue(operator=operators.position(value.producer), output=value.output_index)
    assert value.role is not ValueRole.ACTIVATION  # an activation has a producer
    return InputValue(role=value.role, name=value.name)


def _operator_positions(decision: Decision, graph: OperatorGraph) -> tuple[int, ...]:
    known = {operator.identity: operator.index for operator in graph.operators}
    missing = [identity for identity in decision.operators if identity not in known]
    if missing:
        raise PlanError(
            f"the plan runs {shown(missing[0])}, which the traced step lacks"
            f"{f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''}: plan this model again"
        )
    return tuple(known[identity] for identity in decision.operators)


def _value_positions(decision: Decision, graph: OperatorGraph, operators: tuple[int, ...]) -> list[int]:
    inputs = {(graph.values[index].role, graph.values[index].name): index for index in graph.inputs}
    found = []
    for reference in decision.values:
        if isinstance(reference, InputValue):
            index = inputs.get((reference.role, reference.name))
            if index is None:
                raise PlanError(f"the plan uses {reference.role} {reference.name}, which the traced step lacks")
        else:
            operator = graph.operators[_entry(operators, reference.operator, "operator")]
            name = shown(operator.identity)
            index = _entry(operator.outputs, reference.output, f"output of {name}")
            if index is None:
                raise PlanError(f"the plan uses output {reference.output} of {name}, which is no tensor")
        found.append(index)
    return found


def _entry(entries: Sequence[_Entry], position: int, what: str) -> _Entry:
    if position >= len(entries):
        raise PlanError(f"the plan points to {what} {position}, but has {len(entries)} of them: the file is damaged")
    return entries[position]
