"""Knapsacks at full rows: optimal where nothing but two rows is in the way, never worse, always within the limits."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems.isolated_problems import isolated_problem

from formulations.encodings.flat import FlatProblem, flatten
from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.exact import brute_force
from formulations.solvers.local_search.incumbent_search import IncumbentSearch
from formulations.solvers.local_search.knapsack_rows import fill_rows
from formulations.solvers.local_search.moves import total_cost, usage_of
from formulations.solvers.local_search.multiple_choice_knapsack import RowIndex, index_rows, isolated_nodes, users_of

TOLERANCE = 0.25


def filled(flat: FlatProblem, choices: np.ndarray, row: int) -> tuple[np.ndarray, float]:
    """Fill a row from a copy; the usage that is kept along the way must be that of the result."""
    after = choices.copy()
    usage_now = usage_of(flat.graph, flat.usage, after)
    index = index_rows(flat.usage, isolated_nodes(flat.graph, flat.usage))
    gain = fill_rows(flat.graph, flat.usage, flat.unary, flat.unary, after, index, row, usage_now, TOLERANCE)
    assert np.array_equal(usage_now, usage_of(flat.graph, flat.usage, after))
    return after, gain


def test_costs_fall_by_what_it_says_and_limits_hold() -> None:
    rng = np.random.default_rng(0)
    gained = 0
    for seed in range(1500):
        problem = isolated_problem(seed)
        flat = flatten(problem)
        if flat.contradiction or flat.penalty > 1e15:
            continue  # costs of 10^18 are beyond exact float sums
        for _ in range(2):
            choices = np.array([rng.integers(size) for size in flat.graph.sizes], dtype=np.int64)
            if not check(problem, flat.original_choices(choices)).ok:
                continue
            for row in range(len(flat.usage.limit)):
                before = total_cost(flat.graph, flat.unary, flat.tables, choices)
                after, gain = filled(flat, choices, row)
                assert total_cost(flat.graph, flat.unary, flat.tables, after) == pytest.approx(before - gain)
                assert check(problem, flat.original_choices(after)).ok, seed
                gained += gain > 0
    assert gained > 200


def knapsack(seed: int, rows: int, scale: int = 1) -> StrategyProblem:
    """Up to six nodes over one or two times, with a limit from what is least to what is cheapest."""
    rng = np.random.default_rng(seed)
    nodes = []
    most = int(rng.choice([2, 9, 60]))
    for i in range(int(rng.integers(1, 7))):
        size = int(rng.integers(1, 5))
        start = int(rng.integers(rows))
        own = [(start, rows)] if rng.random() < 0.7 else [(t, t + 1) for t in range(rows)]
        usage = tuple(UsageTerm(0, a, b, scale * rng.integers(0, most, size, endpoint=True)) for a, b in own)
        nodes.append(Node(f"n{i}", rng.integers(0, most, size, endpoint=True), None, usage))
    low, high = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    for node in nodes:
        for term in node.usage:
            low[term.start : term.end] += term.amount.min()
            high[term.start : term.end] += term.amount.max()
    limit = int(rng.integers(low.max(), high.max(), endpoint=True))
    return StrategyProblem(f"knapsack-{seed}", tuple(nodes), (), (Resource("device", limit),), rows)


def first_fit(problem: StrategyProblem) -> tuple[int, ...] | None:
    """Any assignment within the limits, by enumeration; not the cheapest unless by chance."""
    dear = [Node(n.name, -n.cost, n.forbidden, n.usage) for n in problem.nodes]
    turned = StrategyProblem(problem.name, tuple(dear), (), problem.resources, problem.horizon)
    return brute_force.solve(turned, SolveOptions(), lambda _: None, lambda _: None).choices


@pytest.mark.parametrize("rows", [1, 2])
def test_is_optimal_where_only_two_rows_matter(rows: int) -> None:
    gained = compared = 0
    for seed in range(1500):
        problem = knapsack(seed, rows)
        start = first_fit(problem)
        flat = flatten(problem)
        choices = None if start is None or flat.contradiction else flat.flat_choices(start)
        if choices is None or not len(flat.usage.limit):
            continue
        free = np.diff(flat.usage.node_start)[flat.graph.sizes > 1]
        users = users_of(flat.usage, index_rows(flat.usage, isolated_nodes(flat.graph, flat.usage)), 0)
        if (free == 0).any() or len(users) < len(free):
            continue  # a node that does not use the row is not its business
        expected = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None).bound
        after, gain = filled(flat, choices, 0)
        assert check(problem, flat.original_choices(after)).objective == expected, seed
        compared += 1
        gained += gain > 0
    assert compared > 300
    assert gained > compared / 2


def test_a_coarse_unit_keeps_the_present_choices() -> None:
    """Amounts of 10^6 and more cannot all have a state: what is found fits, is no worse, and often best."""
    best = compared = 0
    for seed in range(400):
        problem = knapsack(seed, 1, scale=10**6 + 1)
        start = first_fit(problem)
        flat = flatten(problem)
        choices = None if start is None or flat.contradiction else flat.flat_choices(start)
        if choices is None or not len(flat.usage.limit):
            continue
        after, gain = filled(flat, choices, 0)
        report = check(problem, flat.original_choices(after))
        assert report.ok
        assert gain >= 0
        expected = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None).bound
        compared += 1
        best += report.objective == expected
    assert compared > 200
    assert best > 0.9 * compared


def test_where_a_limit_is_exceeded_nothing_moves() -> None:
    nodes = tuple(Node(f"n{i}", np.array([0, 5]), None, (UsageTerm(0, 0, 1, np.array([9, 1])),)) for i in range(3))
    flat = flatten(StrategyProblem("over", nodes, (), (Resource("device", 12),), 1))
    choices = np.zeros(3, dtype=np.int64)
    after, gain = filled(flat, choices, 0)
    assert (after.tolist(), gain) == ([0, 0, 0], 0.0)


def test_the_index_knows_who_uses_a_row() -> None:
    for seed in range(200):
        flat = flatten(isolated_problem(seed))
        if flat.contradiction:
            continue
        nodes = isolated_nodes(flat.graph, flat.usage)
        usage = flat.usage
        for lists in (2, 256):
            index = coarse_index(flat, nodes, lists)
            for row in range(len(usage.limit)):
                expected = [
                    i
                    for i in nodes.tolist()
                    if any(
                        usage.low[q] <= row < usage.high[q]
                        for q in range(int(usage.node_start[i]), int(usage.node_start[i + 1]))
                    )
                ]
                assert users_of(usage, index, row).tolist() == expected, seed


def coarse_index(flat: FlatProblem, nodes: np.ndarray, lists: int) -> RowIndex:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("formulations.solvers.local_search.multiple_choice_knapsack.EXCHANGE_LISTS", lists)
        return index_rows(flat.usage, nodes)


def test_filling_ends_with_knapsacks() -> None:
    """Three leave what two others take, which no exchange of one taker and cheapest reliefs finds at first."""
    amounts, costs = (5, 5, 5, 7, 8), (10, 10, 10, 16, 17)
    nodes = tuple(
        Node(f"n{i}", np.array([0, cost]), None, (UsageTerm(0, 0, 1, np.array([amount, 0])),))
        for i, (amount, cost) in enumerate(zip(amounts, costs, strict=True))
    )
    problem = StrategyProblem("swap", nodes, (), (Resource("device", 15),), 1)
    flat = flatten(problem)
    search = IncumbentSearch(problem, flat, lambda choices, objective: None)
    choices = np.array([0, 0, 0, 1, 1])
    search.fill(choices, search.usage(choices), np.array([2.0]))
    assert search.objective == 30
    assert search.best is not None
    assert search.best.tolist() == [1, 1, 1, 0, 0]
