"""Inputs of the offload models: the time to copy each activation, and the links and memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from formulations.problem.strategy_problem import IntArray
from formulations.step.offload.modes import Links, waiting_outputs
from formulations.step.training_step import NodeKind, StepDecision, StepModel, StepNode
from planner.machine.cluster import HostCopies
from planner.machine.costs import CostModel
from planner.replay.clocks import StepCosts
from planner.schedule.instructions import Schedule
from planner.schedule.storage_uses import StorageUses
from planner.scheduling.offload_limit import DeviceLimit
from planner.scheduling.offload_schedule import with_offload
from planner.strategies.space import StrategySpace

LEAST_SHARE = 1e-3
"""Part of all activations that one operator's outputs must have to be worth a copy."""


def links_of(costs: CostModel, host_bytes: int | None) -> Links:
    """Links and memory that the cluster's host has for one device."""
    return Links(host_bytes, blocking=costs.host_copies is HostCopies.BLOCKING)


def with_transfer_costs(model: StepModel, seconds: Callable[[IntArray], IntArray]) -> StepModel:
    """The same step with the copy time of every activation that is worth offloading.

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


def offload_schedule(
    space: StrategySpace, decision: StepDecision, schedule: Schedule, costs: StepCosts, limit: DeviceLimit | None
) -> Schedule:
    """Schedule of a decision with its offloads and prefetches, timed by the links and the memory limit.

    Parameters
    ----------
    space
        Strategies that the decision's layouts index.
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
    values = []
    for node in sorted(decision.offloaded):
        operator = space.nodes[node].operator
        assert operator is not None, "only operators' outputs are offloaded"
        outputs = space.graph.operators[operator].outputs
        read = (outputs[k] for k in waiting_outputs(space.model, node))
        values += [value for value in read if value is not None and not uses.refusal(value)]
    return with_offload(space.graph, schedule, values, costs, limit)
