"""How the tree splits a branch, and what it reports on the way; that its proofs hold is in the differential tests."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems.tight_problems import tight_problem
from support.tiers import slow

from formulations.encodings.flat import flatten
from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.branching import branch_and_bound
from formulations.solvers.branching.branch_and_bound import _split
from formulations.solvers.branching.relaxation import Relaxed
from formulations.solvers.exact import brute_force


def knapsack(usages: list[list[int]], limit: int) -> StrategyProblem:
    """Nodes that all use memory at once; a strategy costs what it saves of the node's most."""
    nodes = []
    for i, amounts in enumerate(usages):
        amount = np.array(amounts, dtype=np.int64)
        nodes.append(Node(f"node {i}", 3 * (amount.max() - amount) + i, None, (UsageTerm(0, 0, 1, amount),)))
    return StrategyProblem("knapsack", tuple(nodes), (), (Resource("memory", limit),), 1)


def relaxed_at(problem: StrategyProblem, price: float, values: list[list[float]]) -> Relaxed:
    flat = flatten(problem)
    allowed = np.ones(len(flat.unary), dtype=np.bool_)
    prices = np.full(len(flat.usage.limit), price)
    return Relaxed(allowed, None, False, (prices, np.zeros(0)), np.concatenate([np.array(own) for own in values]))


def split_node(problem: StrategyProblem, relaxed: Relaxed) -> tuple[int, list[list[int]]]:
    """The node that was split, and the strategies of either half."""
    flat = flatten(problem)
    halves = _split(flat, relaxed.allowed, flat.graph.sizes, relaxed)
    offset = flat.graph.offset
    assert not (halves[0] & halves[1] & ~relaxed.allowed).any()
    assert (halves[0] | halves[1]).all()
    (node,) = [i for i in range(len(problem.nodes)) if not halves[0][offset[i] : offset[i + 1]].all()]
    return node, [np.flatnonzero(half[offset[node] : offset[node + 1]]).tolist() for half in halves]


def test_the_node_whose_usage_is_mixed_widest_is_split() -> None:
    problem = knapsack([[10, 11], [0, 100], [0, 500]], 300)
    mixed = [0.5, 0.5]
    assert split_node(problem, relaxed_at(problem, 1.0, [mixed, mixed, mixed]))[0] == 2
    assert split_node(problem, relaxed_at(problem, 1.0, [mixed, mixed, [1.0, 0.0]]))[0] == 1
    assert split_node(problem, relaxed_at(problem, 1.0, [[0.9, 0.1], [1.0, 0.0], [0.0, 1.0]]))[0] == 0


def test_half_of_the_weight_is_on_either_side() -> None:
    problem = knapsack([[0, 10, 20, 30]], 15)
    node, halves = split_node(problem, relaxed_at(problem, 1.0, [[0.1, 0.4, 0.2, 0.3]]))
    assert node == 0
    assert halves == [[1, 3], [0, 2]]


def test_without_a_relaxation_the_most_strategies_are_cut_in_half() -> None:
    problem = knapsack([[0, 10], [0, 10, 20, 30]], 15)
    unknown = Relaxed(np.ones(6, dtype=np.bool_), None, False)
    assert split_node(problem, unknown) == (1, [[0, 1], [2, 3]])
    decided = relaxed_at(problem, 1.0, [[1.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    assert split_node(problem, decided) == (1, [[0, 1], [2, 3]])


@pytest.mark.parametrize("seeds", [range(120), slow(range(120, 400))], ids=["sample", "length"])
@pytest.mark.parametrize("start", ["none", "dearest", "best"])
def test_bounds_rise_to_the_optimum_whatever_the_tree_begins_from(start: str, seeds: range) -> None:
    """With the dearest assignment it begins on a large core, and again on smaller ones for better ones."""
    branched = 0
    for seed in seeds:
        problem = tight_problem(seed)
        truth = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None)
        if truth.choices is None or truth.bound is None:
            continue
        begin = {"none": None, "best": truth.choices, "dearest": dearest(problem, seed)}[start]
        bounds: list[int] = []
        claim = branch_and_bound.solve(
            problem,
            SolveOptions(initial_choices=begin),
            lambda line, own=bounds: own.append(line.bound or 0),
            lambda _: None,
            most_enumerated=1,
        )
        if "too large" in claim.message:
            continue
        branched += claim.iterations > 1
        assert bounds == sorted(bounds), seed
        assert claim.bound == truth.bound, seed
        assert max(bounds, default=truth.bound) <= truth.bound, seed
        assert claim.choices is not None
        assert check(problem, claim.choices).objective == truth.bound, seed
    assert branched >= len(seeds) // 30


def dearest(problem: StrategyProblem, seed: int) -> tuple[int, ...] | None:
    """The dearest feasible one of a hundred random assignments, if any."""
    rng = np.random.default_rng(seed)
    drawn = [tuple(int(rng.integers(node.size)) for node in problem.nodes) for _ in range(100)]
    feasible = [(report.objective or 0, own) for own in drawn if (report := check(problem, own)).ok]
    return max(feasible)[1] if feasible else None


@pytest.mark.parametrize("seeds", [range(60), slow(range(60, 400))], ids=["sample", "length"])
def test_below_a_cost_the_optimum_is_found_or_the_cost_is_the_bound(seeds: range) -> None:
    found = excluded = 0
    for seed in seeds:
        problem = tight_problem(seed)
        optimum = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None).bound
        for below in () if optimum is None else (optimum - 1, optimum, optimum + 1, optimum + 1000):
            assert optimum is not None
            claim = branch_and_bound.solve(
                problem, SolveOptions(), lambda _: None, lambda _: None, most_enumerated=1, below=below
            )
            if "too large" in claim.message:
                continue
            assert not claim.proved_infeasible, seed
            assert claim.bound == min(below, optimum), seed
            if below > optimum:
                assert claim.choices is not None, seed
                assert check(problem, claim.choices).objective == optimum, seed
            found += below > optimum
            excluded += below <= optimum
    assert found >= 20
    assert excluded >= 20
