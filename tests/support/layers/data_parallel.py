"""Plans of operators that are data parallelism: every batch divided by rows, parameters whole or sharded."""

from __future__ import annotations

import numpy as np
from support.steps.planned_steps import plan_of, strategy_space

from formulations.step.training_step import StepDecision
from planner.graph.operator_graph import ValueRole
from planner.graph.placement import REPLICATE
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.plan.document import Plan
from planner.scheduling.builder import build_schedule
from planner.strategies.instruction_costs import InstructionCosts
from planner.strategies.space import StrategySpace


def data_parallel_plan(name: str, mesh: tuple[int, ...], sharded: bool, micro_batches: int = 1) -> Plan:
    """A plan in which nothing is sent but gradients, and parameters where they are sharded."""
    space = strategy_space(name, mesh)
    schedule = build_schedule(space, data_parallel_decision(space, sharded))
    cost_model = CostModel(load_cluster("a100-8-nvlink"), mesh, micro_batches)
    costs = InstructionCosts(space.graph, cost_model, space.operator_strategies, "adamw")
    return plan_of(name, schedule, costs, "adamw", micro_batches)


def data_parallel_decision(space: StrategySpace, sharded: bool) -> StepDecision:
    """Layouts in which batches are divided by rows on every axis; operator by operator, without resharding."""
    mesh = space.mesh
    whole, rows = (REPLICATE,) * len(mesh), ("S0",) * len(mesh)
    inputs = [space.graph.values[node.value].role if node.value is not None else None for node in space.nodes]
    edges: list[list] = [[] for _ in space.nodes]
    for edge in space.model.edges:
        edges[edge.consumer].append(edge)
    layouts: list[int] = []
    of_batch: set[int] = set()
    for k, strategies in enumerate(space.strategies):
        wanted = {ValueRole.PARAMETER: whole, ValueRole.BUFFER: whole, ValueRole.INPUT: rows, ValueRole.TANGENT: whole}
        if inputs[k] is not None:
            placed = [strategy.outputs[0] for strategy in strategies]
            layouts.append(placed.index(wanted[inputs[k]]))
            of_batch.update([k] if inputs[k] is ValueRole.INPUT else [])
            continue
        sent = sum((edge.cost[layouts[edge.producer]] for edge in edges[k]), np.zeros(len(strategies), np.int64))
        never = sum((edge.forbidden[layouts[edge.producer]] for edge in edges[k]), np.zeros(len(strategies), np.int64))
        if not any(edge.producer in of_batch for edge in edges[k]):
            layouts.append(next(j for j, s in enumerate(strategies) if {*s.outputs} <= {whole, None}))
            continue
        of_batch.add(k)
        words = [[word for placement in s.outputs if placement for word in placement] for s in strategies]
        parts = [(-found.count("S0"), sum(word[0] == "S" for word in found)) for found in words]
        layouts.append(min(range(len(strategies)), key=lambda s: (never[s], sent[s], parts[s])))
    if sharded:
        for k, role in enumerate(inputs):
            placed = [strategy.outputs[0] for strategy in space.strategies[k]]
            if role is ValueRole.PARAMETER and rows in placed:
                layouts[k] = placed.index(rows)
    return StepDecision(tuple(layouts), {})
