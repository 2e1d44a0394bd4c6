"""Random decisions: layouts that can be joined, and better ones the more care they are drawn with."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from support.steps.planned_steps import strategy_space

from planner.strategies.random_decision import random_decision

CARE = (0.0, 0.5, 1.0)


def cost_of(model, layouts) -> int:
    """Cost of a step without recomputation; what cannot be joined is an error."""
    cost = 0
    for node, layout in zip(model.nodes, layouts, strict=True):
        cost += int(node.cost[layout]) + (0 if node.update_cost is None else int(node.update_cost[layout]))
    for edge in model.edges:
        pair = layouts[edge.producer], layouts[edge.consumer]
        assert not edge.forbidden[pair]
        cost += int(edge.cost[pair])
    for gradient in model.gradients:
        pair = layouts[gradient.producer], layouts[gradient.parameter]
        assert not gradient.forbidden[pair]
        cost += int(gradient.cost[pair])
    for result in model.results:
        assert not result.forbidden[layouts[result.producer]]
        cost += int(result.cost[layouts[result.producer]])
    return cost


@pytest.mark.parametrize(("name", "mesh"), [("mlp", (2,)), ("gpt2", (2,)), ("gpt2", (2, 2))])
def test_more_care_costs_less_and_layouts_can_be_joined(name, mesh):
    space = strategy_space(name, mesh)
    costs = [
        [cost_of(space.model, random_decision(space, seed, care=care).layouts) for seed in range(12)] for care in CARE
    ]
    assert fmean(costs[0]) > fmean(costs[1]) > fmean(costs[2])
    assert all(careful < careless for careless, careful in zip(costs[0], costs[2], strict=True))


def test_the_same_seed_gives_the_same_decision():
    space = strategy_space("gpt2", (2,))
    drawn = [random_decision(space, 3, care=0.5) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert not np.array_equal(drawn[0].layouts, random_decision(space, 4, care=0.5).layouts)
