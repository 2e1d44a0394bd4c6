"""Every in-process solver against enumeration on thousands of random problems."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from support.problems.random_problems import random_problem, training_step_problem, with_limits
from support.tiers import first

from formulations.encodings.elimination import CostTable, TooWideError, minimise
from formulations.encodings.flat import flatten, message_entries
from formulations.problem.checker import check
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import Factor, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.exact import brute_force
from formulations.solvers.exact.brute_force import TooManyAssignmentsError
from formulations.solvers.prices import lagrangian
from formulations.solvers.prices.dual_bound import exact_bound
from formulations.solvers.reference import greedy, tree_dp

SEEDS_PER_CASE = 100
CASES = 22
SOLVERS = {"greedy": greedy, "lagrangian": lagrangian, "tree_dp": tree_dp}


def _solve(solver: object, problem: StrategyProblem, iterations: int = 8, seed: int = 0) -> Claim:
    """Run a solver and check what it reports on the way: assignments feasible, progress monotone."""
    progress: list[Progress] = []
    found: list[tuple[int, ...]] = []
    options = SolveOptions(time_limit=30.0, iteration_limit=iterations, seed=seed)
    claim = solver.solve(problem, options, progress.append, found.append)
    objectives = [check(problem, choices).objective for choices in found]
    assert all(check(problem, choices).ok for choices in found)
    assert objectives == sorted(objectives, reverse=True)
    if claim.choices is not None:
        assert found[-1] == claim.choices
        assert check(problem, claim.choices, None, claim.bound).ok
    return claim


@cache
def _optimum(seed: int) -> int | None:
    """Optimal cost by enumeration, or None where the problem is infeasible."""
    claim = brute_force.solve(random_problem(seed), SolveOptions(), lambda _: None, lambda _: None)
    assert claim.proved_infeasible == (claim.choices is None)
    return claim.bound


@pytest.mark.parametrize("seed", range(150))
def test_enumeration_equals_the_definition(seed: int) -> None:
    problem = random_problem(seed, "tiny")
    feasible = []
    for choices in itertools.product(*(range(node.size) for node in problem.nodes)):
        report = check(problem, choices)
        if report.ok:
            feasible.append((report.objective, choices))
    claim = _solve(brute_force, problem)
    assert claim.proved_infeasible == (not feasible)
    if feasible:
        assert (claim.bound, claim.choices) == min(feasible)


@pytest.mark.parametrize("case", first(CASES // 2, range(CASES), 4))
@pytest.mark.parametrize("name", SOLVERS)
def test_bound_optimum_heuristic(name: str, case: int) -> None:
    feasible, solved, tight = 0, 0, 0
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        optimum = _optimum(seed)
        claim = _solve(SOLVERS[name], random_problem(seed))
        if optimum is None:
            assert claim.choices is None, seed
            continue
        feasible += 1
        assert not claim.proved_infeasible, seed
        if claim.bound is not None:
            assert claim.bound <= optimum, seed
            tight += claim.bound == optimum
        if claim.choices is not None:
            cost = check(random_problem(seed), claim.choices).objective
            assert cost >= optimum, seed
            solved += 1
            if name == "tree_dp":
                assert cost == claim.bound == optimum, seed
    # Heuristics may miss; that they nearly always find something is what makes them worth running.
    assert solved >= {"greedy": 0.98, "lagrangian": 0.98, "tree_dp": 0.5}[name] * feasible
    assert tight >= {"greedy": 0.0, "lagrangian": 0.6, "tree_dp": 0.6}[name] * feasible


def test_dynamic_programming_is_exact_without_limits() -> None:
    for seed in range(300):
        problem = random_problem(seed)
        free = with_limits(problem, [None] * len(problem.resources))
        reference = _solve(brute_force, free)
        claim = _solve(tree_dp, free)
        assert (claim.bound, claim.proved_infeasible) == (reference.bound, reference.proved_infeasible), seed


def test_any_prices_and_messages_give_a_bound() -> None:
    rng = np.random.default_rng(0)
    checked = 0
    for seed in range(400):
        problem, optimum = random_problem(seed), _optimum(seed)
        flat = flatten(problem)
        if optimum is None or flat.contradiction:
            continue
        messages = message_entries(flat.graph)
        scale = 10.0 ** rng.uniform(-3, 20)
        per_limit = 10.0 ** rng.uniform(-3, 6) / np.maximum(flat.usage.limit, 1.0)
        prices = rng.random(len(flat.usage.limit)) * per_limit
        assert exact_bound(problem, flat, prices, scale * rng.standard_normal(messages)) <= optimum, seed
        checked += 1
    assert checked > 200


@pytest.mark.parametrize("name", SOLVERS)
def test_deterministic(name: str) -> None:
    for seed in range(60):
        problem = random_problem(seed)
        assert _solve(SOLVERS[name], problem, seed=3) == _solve(SOLVERS[name], problem, seed=3)
    medium = training_step_problem(5, operators=60, strategies=5)
    assert _solve(SOLVERS[name], medium, 20, seed=1) == _solve(SOLVERS[name], medium, 20, seed=1)


@pytest.mark.parametrize("memory", [0.05, 0.3, 0.8])
def test_small_gap_on_training_steps(memory: float) -> None:
    problem = training_step_problem(2, operators=150, strategies=6, memory=memory)
    claim = _solve(lagrangian, problem, 150)
    assert claim.choices is not None
    assert claim.bound is not None
    report = check(problem, claim.choices)
    assert report.objective is not None
    assert claim.bound <= report.objective <= 1.01 * claim.bound
    quick = _solve(greedy, problem, 12)
    assert quick.choices is not None
    quick_report = check(problem, quick.choices)
    assert quick_report.objective is not None
    assert claim.bound <= quick_report.objective <= 1.15 * claim.bound
    relaxed = _solve(tree_dp, problem)
    assert relaxed.bound is not None
    assert relaxed.bound <= report.objective


def test_start_is_used() -> None:
    problem = training_step_problem(0, operators=40, strategies=4, memory=0.2)
    best = _solve(lagrangian, problem, 60).choices
    assert best is not None
    for solver in (greedy, lagrangian):
        options = SolveOptions(time_limit=30.0, iteration_limit=1, initial_choices=best)
        claim = solver.solve(problem, options, lambda _: None, lambda _: None)
        assert claim.choices is not None
        start, result = check(problem, best).objective, check(problem, claim.choices).objective
        assert start is not None
        assert result is not None
        assert result <= start


def test_contradictory_limits_and_flags_are_proved() -> None:
    usage = (UsageTerm(0, 1, 3, np.array([5, 6])),)
    nodes = tuple(Node(f"n{i}", np.array([1, 2]), None, usage) for i in range(3))
    tight = StrategyProblem("tight", nodes, (), (Resource("device", 14),), 4)
    for solver in (brute_force, greedy, lagrangian):
        assert _solve(solver, tight).proved_infeasible
    for limit, expected in ((15, 3), (18, 3)):
        claim = _solve(lagrangian, with_limits(tight, [limit]))
        assert (claim.bound, claim.choices) == (expected, (0, 0, 0))
    flags = Factor((0, 1), np.zeros((2, 2), np.int64), np.ones((2, 2), np.bool_))
    blocked = StrategyProblem("blocked", nodes, (flags,), (Resource("device", None),), 4)
    for solver in (brute_force, greedy, lagrangian, tree_dp):
        assert _solve(solver, blocked).proved_infeasible


def test_enumeration_refuses_large_problems() -> None:
    nodes = tuple(Node(f"n{i}", np.zeros(3, np.int64)) for i in range(20))
    with pytest.raises(TooManyAssignmentsError, match="3486784401 assignments"):
        _solve(brute_force, StrategyProblem("large", nodes, (), (), 1))


def test_wide_graphs_are_refused_with_a_reason() -> None:
    rng = np.random.default_rng(0)
    nodes = tuple(Node(f"n{i}", rng.integers(0, 9, 30)) for i in range(8))
    factors = tuple(Factor((i, j), rng.integers(0, 9, (30, 30))) for i in range(8) for j in range(i))
    claim = _solve(tree_dp, StrategyProblem("wide", nodes, factors, (), 1))
    assert (claim.choices, claim.bound, claim.proved_infeasible) == (None, None, False)
    assert "too wide" in claim.message
    with pytest.raises(TooWideError):
        minimise([30] * 8, [CostTable(factor.scope, factor.cost) for factor in factors])


def test_elimination_beyond_int64() -> None:
    huge = np.array([[9, 8], [7, 9]], dtype=np.int64) * 10**18
    flags = np.array([[False, False], [True, False]])
    tables = [CostTable((i, i + 1), huge, flags) for i in range(30)]
    assert minimise([2] * 31, tables) == ((29 * 9 + 8) * 10**18, (0,) * 30 + (1,))


def test_a_frustrated_cycle_is_proved() -> None:
    """Message passing alone proves 0 here; exact minimisation on narrow graphs closes the gap."""
    differ = np.array([[1, 0], [0, 1]], dtype=np.int64)
    usage = (UsageTerm(0, 0, 1, np.array([1, 2])),)
    nodes = tuple(Node(f"n{i}", np.zeros(2, np.int64), None, usage) for i in range(21))
    factors = tuple(Factor((i, (i + 1) % 21), differ) for i in range(21))
    problem = StrategyProblem("cycle", nodes, factors, (Resource("device", 31),), 1)
    claim = _solve(lagrangian, problem, 20)
    assert claim.bound == 1
    assert claim.choices is not None
    assert check(problem, claim.choices).objective == 1


def test_nothing_to_decide() -> None:
    empty = StrategyProblem("empty", (), (), (Resource("device", 0),), 0)
    for solver in (brute_force, greedy, lagrangian, tree_dp):
        assert _solve(solver, empty).choices == ()
    single = StrategyProblem("single", (Node("only", np.array([7])),), (), (), 1)
    for solver in (brute_force, greedy, lagrangian, tree_dp):
        assert _solve(solver, single).choices == (0,)
