"""Weights of windows: lawful corners, and bounds that rise to that of the best mixture of plans."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.steps.planned_steps import strategy_space

from formulations.step.replay import replay_decision
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.overlap.link_costs import with_link_costs
from planner.overlap.mixtures import exchanges, mixtures
from planner.overlap.multipliers import SCALE, Multipliers, corners, transfers_at, window_ends
from planner.replay.streams import WHOLE, Slowdowns
from planner.strategies.random_decision import random_decision

PRESET = load_cluster("a100-8-nvlink")
SLOW_LINKS = PRESET.model_copy(update={"intra_node": PRESET.intra_node.model_copy(update={"bandwidth": 2e8})})
SLOWDOWNS = (Slowdowns(), Slowdowns(1270, 1040), Slowdowns(1500, 1000), Slowdowns(1000, 1300), Slowdowns(2500, 2500))


@pytest.mark.parametrize("slowdowns", SLOWDOWNS)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_corners_are_lawful(axes, slowdowns):
    """No second in which the computation, an activation or transfers run is counted more than once."""
    found = corners(axes, slowdowns)
    assert len(found) == 1 + axes * (1 + (slowdowns.computation > WHOLE))
    for corner in found:
        transfers = np.array(corner.transfers)
        assert corner.computation <= WHOLE
        assert transfers.sum() <= WHOLE
        beside = corner.computation * WHOLE / slowdowns.computation + transfers.sum() * WHOLE / slowdowns.collectives
        assert beside <= WHOLE + 1e-9
        for axis in range(axes):
            activation = corner.resharding + corner.activations[axis]
            others = transfers.sum() - transfers[axis]
            assert activation / 2 + transfers[axis] / 2 <= WHOLE  # they share the link
            assert activation + others <= WHOLE


def seen(name, mesh, seeds):
    space = strategy_space(name, mesh)
    model = with_link_costs(space, CostModel(SLOW_LINKS, mesh))
    return model, [random_decision(space, seed) for seed in seeds]


@pytest.mark.parametrize("operators", [1, 2, 3, 7, 8, 9, 100, 1000])
@pytest.mark.parametrize("windows", [1, 2, 8])
def test_windows_are_shortest_at_both_ends_and_cover_every_operator(operators, windows):
    ends = window_ends(operators, windows).tolist()
    assert ends[-1] == operators
    sizes = np.diff([0, *ends])
    assert min(sizes) >= 1
    assert max(sizes) <= -(-operators // windows)
    assert sizes[0] == sizes[-1] == 1 or len(ends) == 1


@pytest.mark.parametrize(("name", "mesh"), [("gpt2", (2,)), ("llama", (2, 2))])
def test_the_bound_of_a_few_plans_rises_to_the_least_time_of_their_mixtures(name, mesh):
    """Of plans that are seen one after another, as the solver finds them, as of plans seen at once."""
    model, decisions = seen(name, mesh, range(6))
    tallies = [replay_decision(model, decision).tally for decision in decisions]
    every, slowdowns = Multipliers(model, len(mesh), Slowdowns(1270, 1040), windows=8), Slowdowns(1270, 1040)
    for tally in tallies:
        every.see(tally)

    def bound(weights):
        return min(tally.weigh(weights) // weights.scale for tally in tallies)

    best = bound(every.next())
    assert best <= min(every.least(tally) for tally in tallies)
    drawn = np.random.default_rng(0)
    for _ in range(200):
        shares = drawn.dirichlet(np.full(every.shape[1], 0.3), every.shape[0])
        assert bound(every.weights(shares)) <= best + len(model.nodes)  # weights are rounded down

    multipliers = Multipliers(model, len(mesh), slowdowns, windows=8)
    multipliers.see(max(tallies, key=every.least))
    bounds = []
    while not multipliers.has_stalled:
        weights = multipliers.next()
        bounds.append(bound(weights))
        multipliers.raised(bounds[-1])
        multipliers.see(min(tallies, key=lambda tally: tally.weigh(weights)))
        assert len(bounds) < 60
    assert max(bounds) == pytest.approx(best, rel=1e-3)
    assert max(bounds) > bounds[0] or bounds[0] >= 0.999 * best


def test_weights_stay_near_the_best_ones_after_a_bound_that_did_not_rise():
    """Each bound that does not rise draws the next ones nearer to the best."""
    model, decisions = seen("gpt2", (2,), range(8))
    multipliers = Multipliers(model, 1, Slowdowns(), windows=8)
    assert multipliers.raised(100)  # of the computation alone, where they begin
    for decision in decisions:
        multipliers.see(replay_decision(model, decision).tally)
    distances = []
    for _ in range(4):
        weights = multipliers.next()
        distances.append(int((SCALE - weights.computation).sum()))
        assert not multipliers.raised(50)
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > distances[1] > 0


def test_transfers_at_their_whole_cost_are_what_a_plan_costs_without_overlap():
    model, decisions = seen("gpt2", (2,), range(3))
    for decision in decisions:
        replayed = replay_decision(model, decision)
        tally, weights = replayed.tally, transfers_at(model, 1, 1.0)
        links = int(tally.gathers.sum() + tally.reductions.sum())
        assert tally.weigh(weights) == SCALE * (
            int(tally.computation.sum() + tally.resharding.sum()) + links + tally.updates
        )
        half = tally.weigh(transfers_at(model, 1, 0.5))
        assert 2 * half == 2 * tally.weigh(weights) - SCALE * links


def test_mixtures_and_exchanges_take_whole_layers():
    model, (first, second) = seen("gpt2", (2,), range(2))
    for mixture in mixtures(model, first, second):
        assert all(layout in pair for layout, *pair in zip(mixture.layouts, first.layouts, second.layouts, strict=True))
    found = list(exchanges(model, first, second))
    assert found
    names = [node.name for node in model.nodes]
    for candidate in found:
        changed = [names[i] for i, layout in enumerate(candidate.layouts) if layout != first.layouts[i]]
        layers = set(re.findall(r"\.h\.(\d+)", " ".join(changed)))
        assert len(layers) <= 1
        assert candidate != first
    assert list(exchanges(model, first, first)) == []
