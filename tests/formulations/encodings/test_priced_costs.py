"""Costs at prices are costs plus priced usage, whatever the prices were before."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems.random_problems import random_problem

from formulations.encodings.flat import FlatProblem, FloatArray, flatten, message_entries
from formulations.encodings.priced_costs import PricedCosts, expected_usage, priced_usage
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


def expected_by_hand(flat: FlatProblem, prices: FloatArray, messages: FloatArray) -> FloatArray:
    """Priced usage of strategies, and of the cheapest entry of every pair that has them."""
    graph, usage = flat.graph, flat.usage
    costs = PricedCosts(flat)
    costs.set(prices)
    found = priced_usage(flat, prices)
    for f in np.flatnonzero(graph.arity == 2):
        shape = tuple(graph.sizes[graph.scope[f, :2]])
        start, size = graph.table_start[f], graph.table_size[f]
        used = np.zeros(shape)
        for q in range(usage.factor_start[f], usage.factor_start[f + 1]):
            amounts = usage.amount[usage.amount_start[q] : usage.amount_start[q] + size].reshape(shape)
            used += prices[usage.low[q] : usage.high[q]].sum() * amounts
        for axis in range(2):
            i, j = graph.scope[f, axis], graph.scope[f, 1 - axis]
            own, other = graph.offset[i], graph.offset[j]
            first = graph.message_start[f, 1 - axis]
            table = costs.tables[start : start + size].reshape(shape) - np.expand_dims(
                messages[first : first + graph.sizes[j]], axis
            )
            allowed = flat.unary[other : other + graph.sizes[j]] < 0.5 * flat.penalty
            best = np.where(np.expand_dims(allowed, axis), table, np.inf).argmin(axis=1 - axis)
            for s, y in enumerate(best):
                if allowed.any():
                    found[own + s] += used[(s, y) if axis == 0 else (y, s)]
    return found


def test_expected_usage_is_that_of_the_cheapest_entries() -> None:
    with_factors = 0
    for seed in range(80):
        flat = flatten(random_problem(seed))
        if flat.contradiction:
            continue
        random = np.random.default_rng(seed)
        prices = np.where(random.random(len(flat.usage.limit)) < 0.5, random.random(len(flat.usage.limit)), 0.0)
        messages = random.normal(0.0, 5.0, message_entries(flat.graph))
        expected = expected_usage(flat, prices, messages)
        assert expected == pytest.approx(expected_by_hand(flat, prices, messages)), seed
        with_factors += bool((expected != priced_usage(flat, prices)).any())
    assert with_factors > 5
