"""Costs at prices are costs plus priced usage, whatever the prices were before."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems.random_problems import random_problem

from formulations.encodings.flat import flatten
from formulations.encodings.priced_costs import PricedCosts, priced_usage
from formulations.solvers.local_search.moves import total_cost, usage_of


def test_what_an_assignment_costs_at_changing_prices() -> None:
    priced_factors = 0
    for seed in range(80):
        flat = flatten(random_problem(seed))
        if flat.contradiction:
            continue
        random = np.random.default_rng(seed)
        costs = PricedCosts(flat)
        choices = np.array([random.integers(size) for size in flat.graph.sizes], dtype=np.int64)
        plain = total_cost(flat.graph, flat.unary, flat.tables, choices)
        usage = usage_of(flat.graph, flat.usage, choices)
        for _ in range(5):
            # Few rows have a price, and every time other ones.
            prices = np.where(random.random(len(usage)) < 0.3, random.random(len(usage)), 0.0)
            costs.set(prices)
            priced_factors += bool((costs.tables != flat.tables).any())
            priced = total_cost(flat.graph, costs.unary, costs.tables, choices)
            assert priced == pytest.approx(plain + float(prices @ usage)), seed
            assert costs.unary == pytest.approx(flat.unary + priced_usage(flat, prices)), seed
        costs.set(np.zeros(len(usage)))
        assert (costs.tables == flat.tables).all(), seed
        assert (costs.unary == flat.unary).all(), seed
    assert priced_factors > 20
