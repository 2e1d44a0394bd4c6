"""Random decisions over a strategy space: any layouts that can be joined, any recomputation that rule 1 allows."""

from __future__ import annotations

import random

import numpy as np

from formulations.models.kiwi_reduced import StepDecision
from formulations.models.step import StepModel
from planner.strategy_space import StrategySpace


def random_decision(space: StrategySpace, seed: int, recompute_share: float = 0.5) -> StepDecision:
    """Draw layouts node by node among those that every earlier producer can reach, then operators to recompute."""
    rng = random.Random(seed)
    model = space.model
    blocks: list[list[tuple[int, np.ndarray]]] = [[] for _ in model.nodes]
    for edge in model.edges:
        blocks[edge.consumer].append((edge.producer, edge.forbidden))
    for gradient in model.gradients:
        blocks[gradient.producer].append((gradient.parameter, gradient.forbidden.T))
    layouts: list[int] = []
    for i, node in enumerate(model.nodes):
        allowed = np.ones(node.size, dtype=bool)
        for earlier, forbidden in blocks[i]:
            allowed &= ~forbidden[layouts[earlier]]
        for result in model.results:
            if result.producer == i:
                allowed &= ~result.forbidden
        choices = np.flatnonzero(allowed)
        assert choices.size, f"{node.name} has no layout that its inputs can reach"
        layouts.append(int(rng.choice(choices.tolist())))
    return StepDecision(tuple(layouts), random_recomputation(model, rng, recompute_share))


def random_recomputation(model: StepModel, rng: random.Random, share: float) -> frozenset[int]:
    """Draw candidates; none of a recomputed operator's inputs is recomputed."""
    chosen: set[int] = set()
    inputs: list[set[int]] = [set() for _ in model.nodes]
    for edge in model.edges:
        inputs[edge.consumer].add(edge.producer)
    for i in np.flatnonzero(model.recompute_candidates).tolist():
        if rng.random() < share and not inputs[i] & chosen:
            chosen.add(i)
    return frozenset(chosen)
