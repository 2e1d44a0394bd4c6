"""Schedules of random decisions: replayed cleanly, at the model's cost and with the model's peak."""

from __future__ import annotations

import pytest
from support.planned_steps import captured_step, strategy_space
from support.random_plans import random_decision

from formulations.checker import check
from formulations.models.kiwi_reduced import build_kiwi_reduced
from planner.cluster import load_cluster
from planner.costs import CostModel
from planner.optimizers import optimizer_named
from planner.replay import OptimizerMemory, replay
from planner.schedule_builder import build_schedule
from planner.step_costs import InstructionCosts

NAMES = ["gpt2", "llama", "vit", "conv_net", "lora_gpt", "tied_gpt", "res_net", "mixture_of_experts"]


def shortest_holds(problem, choices):
    """Complete choices by the earliest end of every hold that the recomputed readers allow."""
    extended = list(choices)
    for hold in range(len(choices), len(problem.nodes)):
        readers = [factor for factor in problem.factors if factor.scope[0] == hold]
        extended.append(
            next(
                state
                for state in range(problem.nodes[hold].size)
                if not any(factor.forbidden[state, extended[factor.scope[1]]] for factor in readers)
            )
        )
    return extended


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_random_decisions_replay_as_the_model_says(name, mesh, optimizer):
    space = strategy_space(name, mesh, optimizer)
    costs = InstructionCosts(
        captured_step(name).graph,
        CostModel(load_cluster("a100-8-nvlink"), mesh),
        space.operator_strategies,
        optimizer,
    )
    problem = build_kiwi_reduced(space.model, None)
    problem.validate()
    exact = 0
    for seed in range(4):
        decision = random_decision(space, seed)
        report = replay(
            space.graph,
            build_schedule(space, decision),
            optimizer=OptimizerMemory(optimizer_named(optimizer)),
            seconds=costs,
            allowed=lambda op: {(s.outputs, s.inputs) for s in space.operator_strategies[op]},
            counter_based_random=True,
        )
        assert report.violations == ()
        assert report.recomputed == len(decision.recomputed)
        choices = [
            layout + (node.size if i in decision.recomputed else 0)
            for i, (layout, node) in enumerate(zip(decision.layouts, space.model.nodes, strict=True))
        ]
        claimed = check(problem, shortest_holds(problem, choices))
        assert claimed.violations == ()
        assert claimed.objective == report.total_quanta
        # A kept input that waits for a recomputed reader is counted until that reader has computed.
        assert claimed.peaks[0].usage >= report.peak_bytes
        exact += claimed.peaks[0].usage == report.peak_bytes
    assert exact >= 1
