"""Decimation decodes what messages say, whatever the order of its decisions."""

from __future__ import annotations

import numpy as np
import pytest

from formulations.encodings.flat import flatten
from formulations.instances.random_families import family_problem
from formulations.problem.solution import SolveOptions, Status
from formulations.problem.strategy_problem import Factor, Node, StrategyProblem
from formulations.solvers import solve
from formulations.solvers.local_search.incumbent_search import exact_objective
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.decimation import decimate


def star_of_chains(rng: np.random.Generator) -> StrategyProblem:
    """A tree: chains around a hub, whose nodes come before and behind the hub in the order of nodes."""
    chains, length, strategies = int(rng.integers(2, 9)), int(rng.integers(1, 4)), int(rng.integers(2, 6))
    count = 1 + chains * length
    label = rng.permutation(count)
    edges = [(0 if k % length == 0 else k, k + 1) for k in range(count - 1)]
    nodes = [Node(f"n{i}", rng.integers(0, 1000, strategies)) for i in range(count)]
    factors = []
    for i, j in edges:
        scope = (int(label[i]), int(label[j]))
        factors.append(Factor(scope, rng.integers(0, 1000, (strategies, strategies))))
    return StrategyProblem("star", tuple(nodes), tuple(factors), (), 1)


@pytest.mark.parametrize("seed", range(20))
def test_on_a_tree_decimation_finds_the_optimum(seed: int) -> None:
    """Messages are exact there: whatever is decided first can be completed at the bound."""
    rng = np.random.default_rng(seed)
    problem = star_of_chains(rng)
    flat = flatten(problem)
    ascent = PriceAscent(flat)
    bound = ascent.sweeps(4 * len(problem.nodes))
    best = solve(problem, "tree_dp", SolveOptions(time_limit=10.0))
    assert best.status is Status.OPTIMAL
    assert bound == pytest.approx(best.objective, abs=1e-6)
    for _ in range(5):
        messages, prices = ascent.messages.copy(), ascent.prices.copy()
        choices = decimate(ascent, ascent.best_prices, rng)
        assert exact_objective(problem, flat.original_choices(choices)) == best.objective
        assert (ascent.messages == messages).all()
        assert (ascent.prices == prices).all()
        assert ascent.sweeps(1) == pytest.approx(bound)


def test_on_hubs_it_decodes_close_to_the_bound() -> None:
    """Where messages are not exact, it is closer to the bound than the last sweep's own assignment in most cases."""
    closer = 0
    for seed in range(20):
        problem = family_problem("hubs", "middle", seed)
        flat = flatten(problem)
        ascent = PriceAscent(flat)
        ascent.sweeps(50)
        rng = np.random.default_rng(seed)
        decoded = exact_objective(problem, flat.original_choices(decimate(ascent, ascent.best_prices, rng)))
        swept = exact_objective(problem, flat.original_choices(ascent.decode(ascent.best_prices, 2)))
        closer += decoded < swept
    assert closer >= 15
