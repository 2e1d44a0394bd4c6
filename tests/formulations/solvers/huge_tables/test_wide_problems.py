"""Bounding and branching of wide problems against enumeration, and which lanes they get."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from support.problems.random_problems import random_problem

from formulations.encodings.flat import FlatProblem, flatten
from formulations.problem.checker import check
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.exact import brute_force
from formulations.solvers.huge_tables import core, price_and_branch
from formulations.solvers.local_search.moves import total_cost, usage_of
from formulations.solvers.prices import bounding as price_bounding
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.fixing import entries_left, judged, largest_objective
from formulations.solvers.running import lanes as portfolio_lanes
from formulations.solvers.running.lanes import lanes_for

PROBLEMS, STARS = 150, 30


@cache
def _optimum(seed: int) -> int | None:
    """Optimal cost by enumeration, or None where the problem is infeasible."""
    return brute_force.solve(random_problem(seed), SolveOptions(), lambda _: None, lambda _: None).bound


def _solve(solver: object, problem: StrategyProblem, options: SolveOptions) -> Claim:
    """Solve; every assignment found on the way must hold, and none cost less than any bound reported."""
    progress: list[Progress] = []
    found: list[tuple[int, ...]] = []
    claim = solver.solve(problem, options, progress.append, found.append)
    costs = [check(problem, choices).objective for choices in found]
    assert all(check(problem, choices).ok for choices in found)
    assert costs == sorted(costs, reverse=True)
    bounds = [entry.bound for entry in progress if entry.bound is not None]
    assert not costs or all(bound <= costs[-1] for bound in bounds)
    if claim.choices is not None:
        assert check(problem, claim.choices, None, claim.bound).ok
    return claim


def _star(seed: int, leaves: int, *, ring: bool) -> StrategyProblem:
    """Two hubs that every leaf touches, on either side of the factor, and perhaps a ring of the leaves."""
    rng = np.random.default_rng(seed)
    held: IntArray = np.array([40, 20, 5], dtype=np.int64)
    nodes = [Node(f"leaf {i}", rng.integers(0, 30, 3), None, (UsageTerm(0, i, i + 3, held),)) for i in range(leaves)]
    nodes += [
        Node(f"hub {h}", rng.integers(0, 30, 5), None, (UsageTerm(0, 0, leaves, held[[0, 0, 1, 1, 2]]),))
        for h in range(2)
    ]
    factors = [Factor((leaves, i), rng.integers(0, 90, (5, 3))) for i in range(leaves)]
    factors += [Factor((i, leaves + 1), rng.integers(0, 90, (3, 5))) for i in range(leaves)]
    if ring:
        factors += [Factor((i, (i + 1) % leaves), rng.integers(0, 40, (3, 3))) for i in range(leaves)]
        factors += [Factor((0, leaves, 2), rng.integers(0, 40, (3, 5, 3)))]
    return StrategyProblem(f"star-{seed}", tuple(nodes), tuple(factors), (Resource("memory", 140),), leaves + 3)


def _feasible_start(flat: FlatProblem, rng: np.random.Generator) -> IntArray | None:
    """Return a random assignment that keeps the limits and nothing forbidden, if a few tries find one."""
    for _ in range(30):
        choices = np.array([rng.integers(size) for size in flat.graph.sizes])
        fits = (usage_of(flat.graph, flat.usage, choices) <= flat.usage.limit).all()
        if fits and total_cost(flat.graph, flat.unary, flat.tables, choices) < 0.5 * flat.penalty:
            return choices
    return None


@pytest.mark.parametrize("start", [False, True])
def test_wide_problems_bound_optimum_incumbent(monkeypatch: pytest.MonkeyPatch, *, start: bool) -> None:
    monkeypatch.setattr(price_bounding, "LARGE_ENTRIES", 0)
    monkeypatch.setattr(price_bounding, "WIDE_TABLE", 0)
    cores = tight = feasible = 0
    for seed in range(31_000, 31_000 + PROBLEMS):
        problem, optimum = random_problem(seed), _optimum(seed)
        if optimum is None:
            continue
        feasible += 1
        choices = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None).choices if start else None
        options = SolveOptions(time_limit=30.0, iteration_limit=3, initial_choices=choices)
        claim = _solve(price_and_branch, problem, options)
        assert not claim.proved_infeasible, seed
        if claim.bound is not None:
            assert claim.bound <= optimum, seed
            tight += claim.bound == optimum
        if start:
            assert claim.choices is not None
            assert check(problem, claim.choices).objective == optimum, seed
        cores += "core of" in claim.message
    assert cores >= 10 * start
    assert tight >= (0.9 if start else 0.4) * feasible


@pytest.mark.slow
def test_wide_problems_branch_on_hubs_where_a_gap_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_bounding, "LARGE_ENTRIES", 0)
    monkeypatch.setattr(price_bounding, "WIDE_TABLE", 0)
    monkeypatch.setattr(core, "MOST_CORE_COLUMNS", -1)
    rng = np.random.default_rng(7)
    branched = closed = 0
    for seed in range(STARS):
        problem = _star(seed, 5, ring=True)
        flat = flatten(problem)
        start = _feasible_start(flat, rng)
        if start is None:
            continue
        optimum = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None).bound
        options = SolveOptions(time_limit=30.0, iteration_limit=20, initial_choices=flat.original_choices(start))
        claim = _solve(price_and_branch, problem, options)
        assert claim.choices is not None
        assert claim.bound is not None
        cost = check(problem, claim.choices).objective
        assert optimum is not None
        assert cost is not None
        assert claim.bound <= optimum <= cost, seed
        branched += "branches" in claim.message
        closed += claim.bound == optimum == cost
    assert branched >= 10
    assert closed >= 10


def test_entries_left_are_those_of_strategies_that_may_be_better() -> None:
    shrunk = guesses = 0
    for seed in range(100):
        flat = flatten(random_problem(seed))
        optimum = _optimum(seed)
        if flat.contradiction or optimum is None:
            continue
        ascent = PriceAscent(flat)
        ascent.sweeps(3)
        proof = judged(flat, ascent.best_prices, ascent.best_messages)
        found = [entries_left(flat, proof, objective) for objective in (optimum + 1, optimum + 10**20)]
        assert len(flat.graph.arity) <= found[0] <= found[1] == len(flat.tables), seed
        shrunk += found[0] < found[1]
        if proof is not None:
            guess = largest_objective(flat, proof, found[0], optimum + 10**6)
            assert guess is None or entries_left(flat, proof, guess) <= found[0], seed
            assert guess is not None or entries_left(flat, proof, proof.bound + 1) > found[0], seed
            guesses += guess is not None
    assert shrunk >= 20
    assert guesses >= 20


def test_wide_problems_have_a_lane_that_only_looks_for_assignments(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _star(0, 10, ring=True)
    two = SolveOptions(workers=2)
    monkeypatch.setattr(portfolio_lanes, "MOST_COLUMNS", 0)
    monkeypatch.setattr(price_bounding, "LARGE_ENTRIES", 0)
    monkeypatch.setattr(price_bounding, "WIDE_TABLE", 20)
    assert "guessed_cores" in {turn.solver for lane in lanes_for(problem, two) for turn in lane}
    monkeypatch.setattr(price_bounding, "WIDE_TABLE", 10)
    bounds, looks = lanes_for(problem, two)
    assert [turn.solver for turn in bounds] == ["price_and_branch"]
    assert [turn.solver for turn in looks] == ["peak_prices", "large_neighbourhood"]
    assert [turn.solver for turn in lanes_for(problem, SolveOptions(workers=4))[2]] == ["lagrangian"]


def test_shared_tables_count_for_every_factor_in_lanes_and_solver_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = tuple(Node(f"op {i}", np.arange(10, dtype=np.int64)) for i in range(12))
    shared: IntArray = np.random.default_rng(0).integers(1, 9, (10, 10))
    problem = StrategyProblem("chain", nodes, tuple(Factor((i, i + 1), shared) for i in range(11)), (), 1)
    assert len(flatten(problem).tables) == shared.size
    monkeypatch.setattr(portfolio_lanes, "MOST_COLUMNS", 0)
    monkeypatch.setattr(price_bounding, "LARGE_ENTRIES", 5 * shared.size)
    monkeypatch.setattr(price_bounding, "WIDE_TABLE", shared.size // 2)
    lanes = lanes_for(problem, SolveOptions(workers=2))
    assert "guessed_cores" not in {turn.solver for lane in lanes for turn in lane}
    progress: list[Progress] = []
    options = SolveOptions(time_limit=30.0, iteration_limit=2)
    price_and_branch.solve(problem, options, progress.append, lambda _: None)
    assert {entry.source for entry in progress} == {"price_bounding"}
