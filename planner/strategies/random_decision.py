"""Random decisions over a strategy space: any layouts that can be joined, any recomputation.

A sample of plans for tests, and for comparing predicted with measured times over more than the best plan.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from formulations.problem.strategy_problem import BoolArray, IntArray
from formulations.step.kiwi_chain import chain_moments, latest_moments
from formulations.step.training_step import Moments, StepDecision, StepModel
from planner.strategies.space import StrategySpace

CAREFUL_SWEEPS = 3
"""Sweeps in which layouts are improved."""

_FORBIDDEN_COST = 2**50
"""More than a step costs; thousands of it do not overflow."""


def random_decision(
    space: StrategySpace,
    seed: int,
    recompute_share: float = 0.5,
    chains: bool = True,
    rank: Callable[[int, int], int] = lambda node, layout: 0,
    care: float = 0.0,
) -> StepDecision:
    """Draw layouts node by node among those that every earlier producer can reach, then operators to recompute.

    Plans of random layouts alone take nearly the same time, since a step is a sum of many draws; plans drawn with
    different care do not.

    Parameters
    ----------
    space
        The strategies.
    seed
        The same decision for the same seed.
    recompute_share
        Probability that an operator that may run again does.
    chains
        Whether inputs of a recomputed operator may be recomputed as well.
    rank
        Of a layout of a node, by their numbers: it is drawn among the possible ones of the least rank.
    care
        Probability that a node then takes the layout that costs the least beside its neighbours, in each of some
        sweeps.
    """
    rng = random.Random(seed)
    model = space.model
    blocks: list[list[tuple[int, BoolArray]]] = [[] for _ in model.nodes]
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
        ranks = [rank(i, choice) for choice in choices.tolist()]
        layouts.append(int(rng.choice([choice for choice, of in zip(choices, ranks, strict=True) if of == min(ranks)])))
    if care:
        _improve(model, layouts, rng, care)
    return StepDecision(tuple(layouts), random_recomputation(model, rng, recompute_share, chains))


def _improve(model: StepModel, layouts: list[int], rng: random.Random, care: float) -> None:
    """Give nodes drawn with a probability their layouts of least cost, one after another; in place."""
    tables: list[list[tuple[int, IntArray]]] = [[] for _ in model.nodes]
    for edge in model.edges:
        cost = np.where(edge.forbidden, _FORBIDDEN_COST, edge.cost)
        tables[edge.consumer].append((edge.producer, cost))
        tables[edge.producer].append((edge.consumer, cost.T))
    for gradient in model.gradients:
        cost = np.where(gradient.forbidden, _FORBIDDEN_COST, gradient.cost)
        tables[gradient.parameter].append((gradient.producer, cost))
        tables[gradient.producer].append((gradient.parameter, cost.T))
    own = [node.cost if node.update_cost is None else node.cost + node.update_cost for node in model.nodes]
    for result in model.results:
        own[result.producer] = own[result.producer] + np.where(result.forbidden, _FORBIDDEN_COST, result.cost)
    for _ in range(CAREFUL_SWEEPS):
        for i, cost in enumerate(own):
            if rng.random() < care:
                layouts[i] = int(np.argmin(cost + sum(table[layouts[other]] for other, table in tables[i])))


def random_recomputation(model: StepModel, rng: random.Random, share: float, chains: bool = True) -> dict[int, Moments]:
    """Draw operators to run again, and moments; without chains none of their inputs is recomputed."""
    chosen: set[int] = set()
    inputs: list[set[int]] = [set() for _ in model.nodes]
    for edge in model.edges:
        inputs[edge.consumer].add(edge.producer)
    moments = chain_moments(model)
    for i in sorted(moments):
        wanted = chains or (model.first_backward_use[i] >= 0 and not inputs[i] & chosen)
        if rng.random() < share and wanted:
            chosen.add(i)
    found = latest_moments(model, {i: rng.choice((None, *moments[i])) if chains else None for i in chosen})
    return {i: (moment,) for i, moment in found.items()}
