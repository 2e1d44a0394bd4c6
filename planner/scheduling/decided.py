"""The decision behind a schedule: the inverse of the builder, for plans that were read from files."""

from __future__ import annotations

from collections import defaultdict

from formulations.step.training_step import NodeKind, StepDecision
from planner.common.plan_error import PlanError
from planner.graph.placement import Placement
from planner.schedule.instructions import Compute, Offload, Schedule
from planner.strategies.space import StrategySpace

_Placed = tuple[tuple[Placement | None, ...], tuple[Placement, ...]]


def decision_of(space: StrategySpace, schedule: Schedule) -> StepDecision:
    """Layouts, reruns and offloaded operators of a schedule.

    Parameters
    ----------
    space
        The strategies that the decision's layouts index.
    schedule
        A schedule of the same graph and mesh, whose reruns come right before the backward operators that read them.

    Raises
    ------
    PlanError
        The schedule places an operator as no strategy does.
    """
    buffers = schedule.buffers
    placed = {number: buffer.placement for number, buffer in enumerate(buffers)}
    node_of = {node.operator: k for k, node in enumerate(space.nodes) if node.operator is not None}
    wanted: dict[int, _Placed] = {
        space.node_of_value[buffers[number].value]: ((placed[number],), ()) for number in schedule.inputs
    }
    copied = {entry.source for entry in schedule.instructions if isinstance(entry, Offload)}
    offloaded: set[int] = set()
    moments: defaultdict[int, list[int]] = defaultdict(list)
    waiting: list[int] = []
    for entry in schedule.instructions:
        if not isinstance(entry, Compute) or entry.operator not in node_of:
            continue  # a view, or no computation
        node = node_of[entry.operator]
        if entry.recompute:
            waiting.append(node)
            continue
        outputs = tuple(None if number is None else placed[number] for number in entry.outputs)
        wanted[node] = outputs, tuple(placed[number] for number in entry.inputs)
        if copied.intersection(entry.outputs):
            offloaded.add(node)
        if space.model.nodes[node].kind is NodeKind.BACKWARD:
            for again in waiting:
                moments[again].append(node)
            waiting.clear()
    layouts = tuple(_layout(space, k, wanted[k]) for k in range(len(space.nodes)))
    return StepDecision(layouts, {k: tuple(found) for k, found in moments.items()}, frozenset(offloaded))


def _layout(space: StrategySpace, node: int, placed: _Placed) -> int:
    for layout, strategy in enumerate(space.strategies[node]):
        if (tuple(strategy.outputs), tuple(strategy.inputs)) == placed:
            return layout
    entry = space.nodes[node]
    name = (
        space.graph.values[entry.value or 0].name
        if entry.operator is None
        else space.graph.operators[entry.operator].identity
    )
    raise PlanError(f"{name} is placed as no rule of this version allows: plan again")
