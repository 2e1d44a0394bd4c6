"""Regional prices weigh usage in runs of nodes, and a walk at them exchanges memory between distant nodes."""

from __future__ import annotations

import time

import numpy as np

from formulations.encodings.flat import flatten
from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import Factor, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.prices import lagrangian
from formulations.solvers.prices.lagrangian import PriceSearch
from formulations.solvers.prices.regions import regional_bias


def test_weights_belong_to_runs_of_nodes_and_leave_what_costs_nothing():
    sizes = np.array([3, 1, 4] * 20)
    random = np.random.default_rng(0)
    seen = []
    for _ in range(200):
        priced = random.uniform(1.0, 2.0, sizes.sum()) * (random.random(sizes.sum()) < 0.7)
        bias = regional_bias(priced, sizes, random)
        assert not bias[priced == 0.0].any()
        weight = 1.0 + bias / np.where(priced == 0.0, np.nan, priced)
        assert np.nanmin(weight) >= np.exp(-4.0) - 1e-9
        assert np.nanmax(weight) <= np.exp(4.0) + 1e-9
        of_node = [part[~np.isnan(part)] for part in np.split(weight, np.cumsum(sizes)[:-1])]
        assert all(np.allclose(part, part[0]) for part in of_node if len(part))
        seen.append(len({round(float(part[0]), 9) for part in of_node if len(part)}))
    assert min(seen) >= 2  # the weight one, and that of a region
    assert max(seen) > 6


def chains_in_a_knapsack(random: np.random.Generator) -> tuple[StrategyProblem, int]:
    """Twelve chains, each large and cheap or small and dear as a whole; few may be large. And the optimum."""
    count, length = 12, 6
    weights, values = random.integers(20, 40, count), random.integers(20, 40, count)
    nodes, factors = [], []
    apart = np.array([[0, 1000], [1000, 0]])
    for weight, value in zip(weights.tolist(), values.tolist(), strict=True):
        first = len(nodes)
        for k in range(length):
            amount = UsageTerm(0, 0, 1, np.array([0, weight]))
            nodes.append(Node(f"n{first + k}", np.array([value, 0]), None, (amount,)))
            if k:
                factors.append(Factor((first + k - 1, first + k), apart))
    limit = int(weights.sum()) * length // 3
    problem = StrategyProblem("knapsack", tuple(nodes), tuple(factors), (Resource("memory", limit),), 1)
    large = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1
    cost = length * (values.sum() - large @ values)
    return problem, int(cost[length * (large @ weights) <= limit].min())


def walked(problem: StrategyProblem, rounds: int, seed: int) -> PriceSearch:
    options = SolveOptions(time_limit=60.0, iteration_limit=2 * rounds, seed=seed)
    search = PriceSearch(problem, flatten(problem), options, lambda _: None, lambda _: None, time.monotonic())
    search.run()
    return search


def excess(seeds: int) -> float:
    """Mean relative excess over the optimum after 100 rounds."""
    found = []
    for seed in range(seeds):
        problem, optimum = chains_in_a_knapsack(np.random.default_rng(seed))
        search = walked(problem, 100, seed)
        choices = search.flat.original_choices(search.search.best)
        assert check(problem, choices).objective == search.search.objective
        assert search.search.objective >= optimum
        found.append(search.search.objective / optimum - 1.0)
    return float(np.mean(found))


def test_a_walk_exchanges_memory_between_chains(monkeypatch):
    with_regions = excess(10)
    monkeypatch.setattr(lagrangian, "regional_bias", lambda priced, sizes, random: np.zeros_like(priced))
    assert with_regions < 0.6 * excess(10)


def test_a_walk_goes_on_from_where_it_ended():
    problem, _ = chains_in_a_knapsack(np.random.default_rng(3))
    search = walked(problem, 5, 0)
    rounds, objective = search.rounds, search.search.objective
    search.options = SolveOptions(time_limit=60.0, iteration_limit=40)
    search.walk(time.monotonic() + 60.0)
    assert rounds < search.rounds == 20
    assert search.search.objective <= objective
