"""Annealing with hubs and bounding of wide problems against enumeration, and their parts against definitions."""

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
from formulations.solvers.huge_tables import annealing, core, price_and_branch
from formulations.solvers.huge_tables.heat_bath import draw_nodes, fields_of, heat_bath, mirrored, update_fields
from formulations.solvers.huge_tables.hub_branching import hubs
from formulations.solvers.huge_tables.hub_moves import answered_costs, move_hubs
from formulations.solvers.local_search.moves import conditional_costs, total_cost, usage_of
from formulations.solvers.prices import bounding as price_bounding
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.fixing import entries_left, judged, largest_objective
from formulations.solvers.running import lanes as portfolio_lanes
from formulations.solvers.running.lanes import lanes_for

PROBLEMS, STARS = 150, 30
MODEST = 10**9
"""Costs up to which single precision leaves an error that the tolerance of these tests allows."""


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


def test_annealing_bound_optimum_incumbent() -> None:
    feasible = optimal = annealed = 0
    problems = [random_problem(seed) for seed in range(30_000, 30_000 + PROBLEMS)]
    problems += [_star(seed, 5, ring=True) for seed in range(STARS)]
    for problem in problems:
        seed = problem.name
        optimum = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None).bound
        claim = _solve(annealing, problem, SolveOptions(time_limit=30.0, iteration_limit=4))
        if optimum is None:
            assert claim.choices is None, seed
            continue
        assert not claim.proved_infeasible, seed
        feasible += 1
        annealed += claim.message.endswith("cycles") and not claim.message.startswith("0")
        if claim.choices is not None:
            cost = check(problem, claim.choices).objective
            assert cost is not None
            assert cost >= optimum, seed
            optimal += cost == optimum
    assert annealed >= 15
    assert optimal >= 0.97 * feasible


def test_annealing_is_deterministic_with_an_iteration_limit() -> None:
    problem = _star(3, leaves=12, ring=True)
    options = SolveOptions(time_limit=30.0, iteration_limit=6)
    first, second = (_solve(annealing, problem, options) for _ in range(2))
    assert first == second


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


def test_moves_keep_the_limits_and_the_books() -> None:
    rng = np.random.default_rng(0)
    moved = hub_moves = 0
    problems = [random_problem(seed) for seed in range(300)] + [_star(s, 10, ring=True) for s in range(20)]
    for problem in problems:
        flat = flatten(problem)
        largest = max(
            [int(abs(f.cost).max()) for f in problem.factors] + [int(abs(n.cost).max()) for n in problem.nodes]
        )
        if flat.contradiction or largest > MODEST:
            continue
        choices = _feasible_start(flat, rng)
        if choices is None:
            continue
        graph, usage = flat.graph, flat.usage
        mirror = mirrored(graph, flat.tables)
        fields = fields_of(graph, flat.unary, flat.tables, mirror, choices)
        usage_now = usage_of(graph, usage, choices)
        state = (flat.tables, mirror, fields, choices, usage_now)
        temperature = float(10.0 ** rng.uniform(-1, 3))
        moved += heat_bath(graph, usage, *state, temperature, 5)
        led = hubs(flat)
        if len(led):
            hub_moves += move_hubs(graph, usage, flat.unary, *state, led, temperature, 0.1 * temperature, 10)
        assert (usage_now == usage_of(graph, usage, choices)).all()
        assert (usage_now <= usage.limit).all()
        assert total_cost(graph, flat.unary, flat.tables, choices) < 0.5 * flat.penalty
        allowed = fields < 0.5 * flat.penalty
        again = fields_of(graph, flat.unary, flat.tables, mirror, choices)
        assert (allowed == (again < 0.5 * flat.penalty)).all()
        assert fields[allowed] == pytest.approx(again[allowed], rel=1e-6, abs=1e-3 + 1e-15 * flat.penalty)
    assert moved > 1000
    assert hub_moves > 50


def test_what_was_forbidden_leaves_no_trace_in_the_fields() -> None:
    """Penalties are a thousand times the sum of all costs, and the mirrored tables are rounded."""
    rng = np.random.default_rng(5)
    for seed in range(20):
        star = _star(seed, 6, ring=True)
        factors = tuple(
            Factor(f.scope, 10_007 * f.cost, rng.random(f.cost.shape) < 0.2 if len(f.scope) == 2 else None)
            for f in star.factors
        )
        flat = flatten(StrategyProblem(star.name, star.nodes, factors, star.resources, star.horizon))
        if flat.contradiction:
            continue
        graph = flat.graph
        mirror = mirrored(graph, flat.tables)
        choices = np.array([rng.integers(size) for size in graph.sizes])
        fields = fields_of(graph, flat.unary, flat.tables, mirror, choices)
        for _ in range(60):
            node = int(rng.integers(len(graph.sizes)))
            before, choices[node] = int(choices[node]), rng.integers(graph.sizes[node])
            update_fields(graph, flat.tables, mirror, choices, node, before, fields)
        exact = np.empty(len(fields))
        for i in range(len(graph.sizes)):
            conditional_costs(graph, flat.unary, flat.tables, choices, i, exact[graph.offset[i] : graph.offset[i + 1]])
        allowed = exact < 0.5 * flat.penalty
        assert fields[allowed] == pytest.approx(exact[allowed], abs=1.0)


def test_cold_draws_never_raise_the_cost() -> None:
    for seed in range(20):
        flat = flatten(_star(seed, 10, ring=True))
        choices = np.array([size - 1 for size in flat.graph.sizes])
        mirror = mirrored(flat.graph, flat.tables)
        fields = fields_of(flat.graph, flat.unary, flat.tables, mirror, choices)
        usage_now = usage_of(flat.graph, flat.usage, choices)
        cost = total_cost(flat.graph, flat.unary, flat.tables, choices)
        for i in range(len(choices)):
            nodes = np.array([i], dtype=np.int64)
            arrays = (flat.tables, mirror, fields, choices, usage_now)
            draw_nodes(flat.graph, flat.usage, *arrays, 1e-6, nodes)
            after = total_cost(flat.graph, flat.unary, flat.tables, choices)
            assert after <= cost
            cost = after


def test_answers_of_neighbours_are_exact_where_they_share_no_factor() -> None:
    rng = np.random.default_rng(1)
    leaves = 6
    for seed in range(20):
        flat = flatten(_star(seed, leaves, ring=False))
        graph = flat.graph
        choices = np.array([rng.integers(size) for size in graph.sizes])
        mirror = mirrored(graph, flat.tables)
        fields = fields_of(graph, flat.unary, flat.tables, mirror, choices)
        present = total_cost(graph, flat.unary, flat.tables, choices)
        for hub in (leaves, leaves + 1):
            found = np.zeros(5)
            answered_costs(graph, flat.tables, mirror, fields, choices, hub, found)
            for s in range(5):
                answered = choices.copy()
                answered[hub] = s
                for leaf in range(leaves):
                    # One after another is exact: leaves do not see each other.
                    answered[leaf] = min(range(3), key=lambda t, leaf=leaf: _with(flat, answered, leaf, t))
                cost = total_cost(graph, flat.unary, flat.tables, answered)
                assert found[s] - fields[graph.offset[hub] + choices[hub]] == pytest.approx(cost - present)


def _with(flat: FlatProblem, choices: IntArray, node: int, strategy: int) -> float:
    changed = choices.copy()
    changed[node] = strategy
    return total_cost(flat.graph, flat.unary, flat.tables, changed)


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


def test_wide_problems_have_a_lane_that_anneals(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _star(0, 10, ring=True)
    two = SolveOptions(workers=2)
    assert all(turn.solver != "annealing" for lane in lanes_for(problem, two) for turn in lane)
    monkeypatch.setattr(portfolio_lanes, "MOST_COLUMNS", 0)
    monkeypatch.setattr(price_bounding, "LARGE_ENTRIES", 0)
    monkeypatch.setattr(price_bounding, "WIDE_TABLE", 20)
    assert all(turn.solver != "annealing" for lane in lanes_for(problem, two) for turn in lane)
    monkeypatch.setattr(price_bounding, "WIDE_TABLE", 10)
    bounds, looks = lanes_for(problem, two)
    assert [turn.solver for turn in bounds] == ["price_and_branch"]
    assert looks[0].solver == "annealing"
    assert len(lanes_for(problem, SolveOptions(workers=4))) == 3


def test_shared_tables_count_for_every_factor_in_lanes_and_solver_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = tuple(Node(f"op {i}", np.arange(10, dtype=np.int64)) for i in range(12))
    shared: IntArray = np.random.default_rng(0).integers(1, 9, (10, 10))
    problem = StrategyProblem("chain", nodes, tuple(Factor((i, i + 1), shared) for i in range(11)), (), 1)
    assert len(flatten(problem).tables) == shared.size
    monkeypatch.setattr(portfolio_lanes, "MOST_COLUMNS", 0)
    monkeypatch.setattr(price_bounding, "LARGE_ENTRIES", 5 * shared.size)
    monkeypatch.setattr(price_bounding, "WIDE_TABLE", shared.size // 2)
    lanes = lanes_for(problem, SolveOptions(workers=2))
    assert "annealing" in {turn.solver for lane in lanes for turn in lane}
    progress: list[Progress] = []
    options = SolveOptions(time_limit=30.0, iteration_limit=2)
    price_and_branch.solve(problem, options, progress.append, lambda _: None)
    assert {entry.source for entry in progress} == {"price_bounding"}
