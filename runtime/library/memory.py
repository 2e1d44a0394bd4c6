"""Predicted peak of a plan's step with the user's optimizer in the place of the plan's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.common.units import format_bytes
from planner.graph.operator_graph import OperatorGraph, TensorSpec
from planner.plan.format import Plan
from planner.replay.checker import OptimizerMemory, replay
from planner.replay.memory import LocalBytes
from planner.schedule.instructions import Free, Instruction, Schedule, Update
from runtime.library.optimizer import UpdateOrder
from runtime.library.optimizer_probe import ElementBytes


@dataclass(frozen=True, slots=True)
class MeasuredOptimizer(OptimizerMemory):
    """Bytes of an optimizer as measured, by the dtype of the parameter.

    Parameters
    ----------
    per_element
        Master copies of 16-bit parameters counted as state.
    """

    per_element: Mapping[str, ElementBytes] = field(default_factory=dict)

    def state_bytes(self, parameter: TensorSpec, local_numel: int) -> int:
        """Bytes that live for the whole step."""
        return self.per_element[parameter.dtype].state * local_numel

    def workspace_bytes(self, parameter: TensorSpec, local_numel: int) -> int:
        """Bytes that live only while the parameter is updated."""
        return self.per_element[parameter.dtype].workspace * local_numel


def predicted_peak(graph: OperatorGraph, schedule: Schedule, optimizer: MeasuredOptimizer, order: UpdateOrder) -> int:
    """Most bytes of one device during a step, by a replay of what is run.

    Parameters
    ----------
    graph, schedule
        The traced step, and the plan's schedule.
    optimizer
        Bytes of the optimizer.
    order
        When it runs.
    """
    run = schedule if order is UpdateOrder.AS_PLANNED else with_updates_last(schedule, order)
    if order is not UpdateOrder.AT_ONCE:
        report = replay(graph, run, optimizer=optimizer)
        assert report.peak_bytes, "the schedule was checked before"
        return report.peak_bytes
    none = {dtype: replace(entry, workspace=0) for dtype, entry in optimizer.per_element.items()}
    report = replay(graph, run, optimizer=replace(optimizer, per_element=none))
    assert report.peak_bytes, "the schedule was checked before"
    first = next(at for at, entry in enumerate(run.instructions) if isinstance(entry, Update))
    return max(report.peak_bytes, int(report.profile.total_during[first]) + _all_workspaces(graph, run, optimizer))


def with_updates_last(schedule: Schedule, order: UpdateOrder) -> Schedule:
    """The schedule with its updates behind everything else, so that all gradients live until then."""
    updates = [entry for entry in schedule.instructions if isinstance(entry, Update)]
    gradients = {entry.gradient for entry in updates}
    instructions: list[Instruction] = []
    last: list[Instruction]
    for entry in schedule.instructions:
        if isinstance(entry, Update):
            continue
        if isinstance(entry, Free):
            entry = Free(tuple(buffer for buffer in entry.buffers if buffer not in gradients))
            if not entry.buffers:
                continue
        instructions.append(entry)
    if order is UpdateOrder.AT_ONCE:
        last = [*updates, Free(tuple(sorted(gradients)))]
    else:
        left = [entry.gradient for entry in updates]
        last = []
        for at, update in enumerate(updates):
            last.append(update)
            if update.gradient not in left[at + 1 :]:
                last.append(Free((update.gradient,)))
    return replace(schedule, instructions=(*instructions, *last))


def excess_message(plan: Plan, peak_bytes: int, optimizer_name: str) -> str:
    """How much more memory a step needs than its plan predicted; empty if none."""
    more = peak_bytes - plan.peak_bytes
    if more <= 0:
        return ""
    planned = plan.decision.options.optimizer
    return (
        f"with {optimizer_name} a step needs {peak_bytes} bytes on each device, {more} bytes ({format_bytes(more)}) "
        f"more than the {plan.peak_bytes} that the plan predicted with {planned}"
    )


def _all_workspaces(graph: OperatorGraph, schedule: Schedule, optimizer: MeasuredOptimizer) -> int:
    local = LocalBytes(graph, schedule.mesh)
    total = 0
    for entry in schedule.instructions:
        if isinstance(entry, Update):
            buffer = schedule.buffers[entry.parameter]
            spec = graph.values[buffer.value].spec
            total += optimizer.workspace_bytes(spec, local.numel(buffer.value, buffer.placement))
    return total
