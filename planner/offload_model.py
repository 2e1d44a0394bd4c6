"""Offload as the models see it: what a copy of each activation takes, and what the host offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from formulations.models.offload import Links
from formulations.models.step import NodeKind, StepDecision, StepModel, StepNode
from formulations.problem import IntArray
from planner.cluster import HostCopies
from planner.costs import CostModel
from planner.offload_limit import DeviceLimit
from planner.offload_schedule import with_offload, with_stays
from planner.offload_timetable import Stay
from planner.replay_time import StepCosts
from planner.schedule import Compute, Schedule
from planner.storage_uses import StorageUses, behind
from planner.strategy_space import StrategySpace

LEAST_SHARE = 1e-3
"""Part of all activations that one operator's outputs must have to be worth a copy."""


def links_of(costs: CostModel, host_bytes: int | None) -> Links:
    """What the cluster's host offers one device."""
    copies = costs.host_copies
    return Links(host_bytes, blocking=copies is HostCopies.BLOCKING, shared=copies is HostCopies.TAKE_TURNS)


def with_transfer_costs(model: StepModel, seconds: Callable[[IntArray], IntArray]) -> StepModel:
    """The same step with the time of a copy for every activation that is worth one.

    Parameters
    ----------
    model
        The step.
    seconds
        Quanta of one copy of so many bytes, elementwise.
    """
    forward = [node for node in model.nodes if node.kind is NodeKind.FORWARD]
    least = LEAST_SHARE * sum(int(node.output_bytes.max(initial=0)) for node in forward)

    def priced(node: StepNode) -> StepNode:
        if node.kind is not NodeKind.FORWARD or int(node.output_bytes.max(initial=0)) < max(1.0, least):
            return node
        copies = np.where(node.output_bytes > 0, seconds(node.output_bytes), 0)
        return replace(node, transfer_cost=copies.astype(np.int64))

    return replace(model, nodes=tuple(priced(node) for node in model.nodes))


def offload_schedules(
    space: StrategySpace, decision: StepDecision, schedule: Schedule, costs: StepCosts, limit: DeviceLimit | None
) -> tuple[Schedule, ...]:
    """Schedules of a decision with its offloads written in, for the replay to choose from.

    One keeps the stays as the model decided them. Its slots are a coarse clock, though, so under a limit a second
    one lets the same activations leave, go and come back when the links of the schedule itself have time for them.

    Parameters
    ----------
    space
        What the decision is over.
    decision
        With operators whose outputs are offloaded.
    schedule
        Of the same decision without offload.
    costs
        Prices of instructions and copies.
    limit
        Device memory to keep, or None.
    """
    uses = StorageUses(space.graph, schedule)
    decided = _decided_stays(space, decision, schedule, uses)
    written = with_stays(schedule, uses, decided)
    if limit is None:
        return (written,)
    values = [schedule.buffers[stay.owner].value for stay in decided]
    return written, with_offload(space.graph, schedule, values, costs, limit)


def _decided_stays(space: StrategySpace, decision: StepDecision, schedule: Schedule, uses: StorageUses) -> list[Stay]:
    """The stays of a decision, as positions in its schedule."""
    computed = {
        instruction.operator: at
        for at, instruction in enumerate(schedule.instructions)
        if isinstance(instruction, Compute) and not instruction.recompute
    }

    def position(node: int) -> int:
        operator = space.nodes[node].operator
        assert operator is not None, "time passes with operators"
        return behind(schedule, computed[operator])

    stays = []
    for node, stay in sorted(decision.offloaded.items()):
        operator = space.nodes[node].operator
        assert operator is not None, "only operators' outputs are offloaded"
        outputs = space.graph.operators[operator].outputs
        for value in (outputs[k] for k in _read_in_backward(space.model, node)):
            if value is None or uses.refusal(value):
                continue
            owner = uses.first_buffer(value)
            assert owner is not None
            leaves, gone, returns = map(position, (stay.leaves_after, stay.gone_after, stay.returns_after))
            stays.append(Stay(owner, leaves, gone, returns, uses.first_backward[owner]))
    return stays


def _read_in_backward(model: StepModel, node: int) -> list[int]:
    """Outputs that backward operators read themselves; what only reruns read stays on the device."""
    edges = model.edges_from[node]
    return sorted({edge.output for edge in edges if model.nodes[edge.consumer].kind is NodeKind.BACKWARD})
