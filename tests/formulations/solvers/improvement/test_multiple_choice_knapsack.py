"""Exchanges among isolated nodes: never worse, within the limits, and they find what single moves cannot."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems.isolated_problems import isolated_problem
from support.problems.random_problems import with_limits

from formulations.encodings.flat import FlatProblem, flatten
from formulations.problem.checker import check, usage_profile
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.exact import brute_force
from formulations.solvers.local_search.incumbent_search import IncumbentSearch
from formulations.solvers.local_search.moves import improve_nodes, total_cost, usage_of
from formulations.solvers.local_search.multiple_choice_knapsack import exchange, index_rows, isolated_nodes

TOLERANCE = 0.25


def exchanged(flat: FlatProblem, choices: np.ndarray) -> tuple[np.ndarray, float]:
    """Exchange from a copy; the usage that is kept along the way must be that of the result."""
    after = choices.copy()
    usage_now = usage_of(flat.graph, flat.usage, after)
    isolated = isolated_nodes(flat.graph, flat.usage)
    gain = exchange(
        flat.graph, flat.usage, flat.unary, after, isolated, index_rows(flat.usage, isolated), usage_now, TOLERANCE
    )
    assert np.array_equal(usage_now, usage_of(flat.graph, flat.usage, after))
    others = np.setdiff1d(np.arange(len(after)), isolated)
    assert np.array_equal(after[others], choices[others])
    return after, gain


def test_costs_fall_by_what_it_says_and_limits_hold() -> None:
    rng = np.random.default_rng(0)
    gained = 0
    for seed in range(1500):
        problem = isolated_problem(seed)
        flat = flatten(problem)
        if flat.contradiction or flat.penalty > 1e15:
            continue  # costs of 10^18 are beyond exact float sums
        for _ in range(3):
            choices = np.array([rng.integers(size) for size in flat.graph.sizes], dtype=np.int64)
            if not check(problem, flat.original_choices(choices)).ok:
                continue
            before = total_cost(flat.graph, flat.unary, flat.tables, choices)
            after, gain = exchanged(flat, choices)
            assert total_cost(flat.graph, flat.unary, flat.tables, after) == pytest.approx(before - gain)
            assert check(problem, flat.original_choices(after)).ok, seed
            gained += gain > 0
    assert gained > 100


def knapsack(seed: int, count: int, spread: int) -> StrategyProblem:
    """Isolated nodes with intervals of their own and a limit halfway between least and cheapest."""
    rng = np.random.default_rng(seed)
    nodes = []
    for i in range(count):
        start = int(rng.integers(0, spread))
        size = int(rng.integers(2, 5))
        amount = np.sort(rng.integers(1, 60, size))[::-1].copy()
        cost = np.sort(rng.integers(0, 100, size))
        nodes.append(Node(f"n{i}", cost, None, (UsageTerm(0, start, start + int(rng.integers(1, 6)), amount),)))
    problem = StrategyProblem(f"knapsack-{seed}", tuple(nodes), (), (Resource("device", None),), spread + 6)
    least = usage_profile(problem, [node.size - 1 for node in nodes])[0].max()
    cheapest = usage_profile(problem, [0] * count)[0].max()
    return with_limits(problem, [int(least + cheapest) // 2])


def settled(flat: FlatProblem) -> np.ndarray:
    """What single moves lead to from the least usage."""
    choices = flat.graph.sizes - 1
    usage_now = usage_of(flat.graph, flat.usage, choices)
    improve_nodes(flat.graph, flat.usage, flat.unary, flat.tables, choices, usage_now, 20, TOLERANCE)
    return choices


def test_closes_part_of_the_gap_that_single_moves_leave() -> None:
    left_before = left_after = 0.0
    for seed in range(60):
        problem = knapsack(seed, count=8, spread=6)
        claim = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None)
        flat = flatten(problem)
        choices = settled(flat)
        after, _ = exchanged(flat, choices)
        assert claim.bound is not None
        left_before += total_cost(flat.graph, flat.unary, flat.tables, choices) - claim.bound
        remaining = total_cost(flat.graph, flat.unary, flat.tables, after) - claim.bound
        assert remaining >= 0
        left_after += remaining
    assert left_after < 0.7 * left_before


def room() -> StrategyProblem:
    """Two small nodes hold what a large one needs, and lose less than it gains; no single move is possible."""
    intervals = ((0, 1), (1, 2), (0, 2))
    costs = (4, 4, 9)
    nodes = tuple(
        Node(f"n{i}", np.array([0, cost]), None, (UsageTerm(0, *interval, np.array([10, 0])),))
        for i, (cost, interval) in enumerate(zip(costs, intervals, strict=True))
    )
    return StrategyProblem("room", nodes, (), (Resource("device", 10),), 2)


def test_two_small_nodes_make_room_for_a_large_one() -> None:
    flat = flatten(room())
    choices = np.array([0, 0, 1])
    usage_now = usage_of(flat.graph, flat.usage, choices)
    assert improve_nodes(flat.graph, flat.usage, flat.unary, flat.tables, choices, usage_now, 9, TOLERANCE) == 0
    after, gain = exchanged(flat, choices)
    assert (after.tolist(), gain) == ([1, 1, 0], 1.0)


def test_filling_ends_with_exchanges() -> None:
    problem = room()
    flat = flatten(problem)
    search = IncumbentSearch(problem, flat, lambda choices, objective: None)
    choices = np.array([0, 0, 1])
    search.fill(choices, search.usage(choices), np.zeros(len(flat.usage.limit)))
    assert search.best is not None
    assert (search.best.tolist(), search.objective) == ([1, 1, 0], 8)
    again = np.array([1, 1, 0])
    search.fill(again, search.usage(again), np.zeros(len(flat.usage.limit)))
    assert search.objective == 8
