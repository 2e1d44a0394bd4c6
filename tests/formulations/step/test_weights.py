"""Weighted costs: problems and replay agree, and plain weights change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.steps.random_steps import decisions, random_step

from formulations.problem.checker import check
from formulations.step.holds import shortest_holds
from formulations.step.kiwi_chain import build_kiwi_chain, chain_moments, encode_kiwi_chain
from formulations.step.modes import once, once_or_twice
from formulations.step.replay import BrokenDecisionError, replay_decision
from formulations.step.sharding import build_sharding
from formulations.step.training_step import StepDecision, StepModel
from formulations.step.weights import StepWeights

AXES = 2


def with_links(model: StepModel, seed: int) -> StepModel:
    """Random times on two links, which together are no longer than the cost."""
    rng = np.random.default_rng(seed)

    def links(cost: np.ndarray) -> np.ndarray:
        first = rng.integers(0, cost + 1)
        return np.stack([first, rng.integers(0, cost - first + 1)])

    return replace(
        model,
        edges=tuple(replace(edge, link_cost=links(edge.cost)) for edge in model.edges),
        gradients=tuple(replace(edge, link_cost=links(edge.cost)) for edge in model.gradients),
    )


def random_weights(model: StepModel, seed: int) -> StepWeights:
    rng, count = np.random.default_rng(seed), len(model.nodes)
    tables = [rng.integers(0, 5, size=(AXES, count)) for _ in range(3)]
    computation, resharding = rng.integers(0, 5, size=(2, count))
    return StepWeights(5, computation, resharding, *tables, int(rng.integers(0, 5)))


def replayed(model: StepModel, decision: StepDecision):
    try:
        return replay_decision(model, decision)
    except BrokenDecisionError:
        return None


@pytest.mark.parametrize("seed", range(60))
def test_problem_and_replay_weigh_alike(seed):
    model = with_links(random_step(seed), seed)
    model = replace(model, weights=random_weights(model, seed))
    moments = chain_moments(model)
    for modes in (once(moments), once_or_twice(model, moments)):
        problem = build_kiwi_chain(model, modes)
        for decision in decisions(model, modes):
            found = replayed(model, decision)
            if found is None:
                continue
            try:
                choices = shortest_holds(problem, encode_kiwi_chain(model, modes, decision))
            except ValueError:
                continue
            verdict = check(problem, choices)
            if verdict.ok:
                assert verdict.objective == found.cost
    sharding = build_sharding(model)
    for decision in decisions(model, {}):
        found = replayed(model, decision)
        if found is not None:
            assert check(sharding, decision.layouts).objective == found.cost


@pytest.mark.parametrize("seed", range(20))
def test_costs_by_when_they_are_paid_add_up(seed):
    model = with_links(random_step(seed), seed)
    moments = once(chain_moments(model))
    for decision in decisions(model, moments):
        found = replayed(model, decision)
        if found is None:
            continue
        tally = found.tally
        given = sum(
            int(edge.cost[decision.layouts[edge.producer], decision.layouts[edge.consumer]])
            * (1 + len(decision.recomputed.get(edge.consumer, ())))
            for edge in model.edges
            if model.nodes[edge.producer].kind in ("input", "parameter")
        )
        reduced = sum(
            int(edge.cost[decision.layouts[edge.producer], decision.layouts[edge.parameter]])
            for edge in model.gradients
        )
        assert tally.computation.sum() + tally.resharding.sum() + tally.updates + given + reduced == found.cost
        assert tally.gathers.sum() <= given
        assert tally.reductions.sum() <= reduced
