"""Branch and bound over hubs against enumeration, and its parts against their definitions."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from support.problems.random_problems import random_problem, with_limits

from formulations.encodings.flat import FlatProblem, flatten, message_entries
from formulations.encodings.flat_restriction import Restriction, narrow, restrict
from formulations.problem.checker import check
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.exact import brute_force
from formulations.solvers.huge_tables import hub_branching
from formulations.solvers.huge_tables.hub_branching import hubs
from formulations.solvers.local_search.moves import total_cost, usage_of
from formulations.solvers.prices.integer_bound import holds_exact_costs, integer_bound
from formulations.solvers.protocol.exchange import EXCHANGE, Update

SEEDS = 1300
BATCHES = 13


def _nothing(_: object) -> None:
    return None


@cache
def _optimum(seed: int) -> int | None:
    """Optimal cost by enumeration, or None where the problem is infeasible."""
    return brute_force.solve(random_problem(seed), SolveOptions(), _nothing, _nothing).bound


def _solve(problem: StrategyProblem, iterations: int, start: tuple[int, ...] | None = None) -> tuple[Claim, list[int]]:
    """Solve; return the claim and all bounds that were reported, after checking what was found on the way."""
    progress: list[Progress] = []
    found: list[tuple[int, ...]] = []
    options = SolveOptions(time_limit=30.0, iteration_limit=iterations, initial_choices=start)
    claim = hub_branching.solve(problem, options, progress.append, found.append)
    assert all(check(problem, choices).ok for choices in found)
    if claim.choices is not None:
        assert found[-1] == claim.choices
    return claim, [entry.bound for entry in progress if entry.bound is not None]


@pytest.mark.parametrize("batch", [*range(3), *(pytest.param(b, marks=pytest.mark.fuzz) for b in range(3, BATCHES))])
def test_bound_optimum_incumbent(batch: int) -> None:
    branched, tight, solved, infeasible, refuted = 0, 0, 0, 0, 0
    for seed in range(batch * SEEDS // BATCHES, (batch + 1) * SEEDS // BATCHES):
        problem, optimum = random_problem(seed), _optimum(seed)
        claim, bounds = _solve(problem, 30)
        if claim.message.startswith("no hubs"):
            continue
        if optimum is None:
            assert claim.choices is None, seed
            infeasible += 1
            refuted += claim.proved_infeasible
            continue
        branched += 1
        assert not claim.proved_infeasible, seed
        assert all(bound <= optimum for bound in bounds), seed
        assert claim.bound is not None, seed
        assert claim.bound <= optimum, seed
        tight += claim.bound == optimum
        if claim.choices is not None:
            cost = check(problem, claim.choices).objective
            assert cost is not None
            assert cost >= optimum, seed
            solved += cost == optimum
    assert branched >= 25
    assert tight >= 0.85 * branched
    assert solved >= 0.95 * branched
    assert refuted >= 0.7 * infeasible


def _starred(seed: int, limit_share: float, length: int = 12) -> StrategyProblem:
    """A chain of nodes of two strategies and one hub of four that touches them all; triples and flags too."""
    rng = np.random.default_rng(seed)
    hub = length
    held: IntArray = np.array([40, 10], dtype=np.int64)
    nodes = [
        Node(f"op {i}", rng.integers(0, 20, 2), None, (UsageTerm(0, i, min(i + 5, length), held),))
        for i in range(length)
    ]
    nodes.append(Node("weight", rng.integers(0, 20, 4), None, (UsageTerm(0, 0, length, np.array([60, 50, 30, 10])),)))
    factors = [Factor((i, i + 1), rng.integers(0, 30, (2, 2)), rng.random((2, 2)) < 0.05) for i in range(length - 1)]
    for i in range(length):
        buffer = UsageTerm(0, i, i + 1, rng.integers(0, 6, (4, 2)))
        factors.append(Factor((hub, i), rng.integers(0, 30, (4, 2)), rng.random((4, 2)) < 0.1, (buffer,)))
    factors += [Factor((i, hub, i + 3), rng.integers(0, 15, (2, 4, 2))) for i in range(0, length - 3, 4)]
    limit = int(60 + limit_share * 210)
    return StrategyProblem(f"star-{seed}", tuple(nodes), tuple(factors), (Resource("memory", limit),), length)


@pytest.mark.slow_cases("0.25-12")
@pytest.mark.parametrize("length", [12, pytest.param(7, marks=pytest.mark.fuzz)])
@pytest.mark.parametrize("limit_share", [0.25, 0.5, 1.0])
def test_hubs_are_solved_to_the_end(limit_share: float, length: int) -> None:
    for seed in range(6 if length > 7 else 200):
        problem = _starred(seed, limit_share, length)
        optimum = brute_force.solve(problem, SolveOptions(), _nothing, _nothing).bound
        claim, bounds = _solve(problem, 300)
        if optimum is None:
            assert claim.choices is None
            continue
        assert claim.bound == optimum
        assert bounds == sorted(bounds)
        assert claim.choices is not None
        assert check(problem, claim.choices).objective == optimum


def test_deterministic_with_an_iteration_limit() -> None:
    problem = _starred(3, 0.5)
    assert _solve(problem, 4) == _solve(problem, 4)


def test_says_at_once_where_there_are_no_hubs() -> None:
    nodes = tuple(Node(f"n{i}", np.array([i % 3, 1], dtype=np.int64)) for i in range(200))
    factors = tuple(Factor((i, i + 1), np.eye(2, dtype=np.int64)) for i in range(199))
    claim, bounds = _solve(StrategyProblem("chain", nodes, factors, (), 1), 1000)
    assert (claim.choices, claim.bound, claim.iterations, bounds) == (None, None, 0, [])
    assert claim.message.startswith("no hubs")
    spokes = tuple(Factor((0, i), np.eye(2, dtype=np.int64)) for i in range(20, 60))
    assert hubs(flatten(StrategyProblem("spokes", nodes, factors + spokes, (), 1))).tolist() == [0]


def test_uses_its_start_and_what_others_found() -> None:
    problem = _starred(1, 0.5)
    best = brute_force.solve(problem, SolveOptions(), _nothing, _nothing).choices
    assert best is not None
    objective = check(problem, best).objective
    claim, _ = _solve(problem, 1, start=best)
    assert claim.choices is not None
    assert check(problem, claim.choices).objective == objective
    EXCHANGE.publish(Update(choices=best))
    with EXCHANGE.subscribed_to(problem):
        claim, _ = _solve(problem, 1)
    EXCHANGE.empty()
    assert claim.choices is not None
    assert check(problem, claim.choices).objective == objective


def _flat_problems(count: int) -> list[tuple[int, StrategyProblem, FlatProblem]]:
    problems = [(seed, random_problem(seed)) for seed in range(count)]
    flats = [(seed, problem, flatten(problem)) for seed, problem in problems]
    return [entry for entry in flats if not entry[2].contradiction]


def _any_left(restriction: Restriction, rng: np.random.Generator) -> IntArray:
    """Choices at random among the strategies that a restriction leaves."""
    offset = restriction.flat.graph.offset
    choices = [rng.choice(np.flatnonzero(restriction.left[a:z])) for a, z in pairwise(offset)]
    return np.array(choices, dtype=np.int64)


@pytest.mark.parametrize("keep", [restrict, narrow])
def test_a_restriction_is_the_same_problem_on_fewer_strategies(keep) -> None:
    rng = np.random.default_rng(0)
    emptied, decided = 0, 0
    for seed, _, flat in _flat_problems(400):
        allowed = rng.random(len(flat.unary)) < rng.choice([0.5, 0.8])
        restriction = keep(flat, allowed)
        kept = [np.flatnonzero(allowed[a:z]) for a, z in zip(flat.graph.offset, flat.graph.offset[1:], strict=False)]
        if restriction is None:
            emptied += 1
            for _ in range(20 if all(len(labels) for labels in kept) else 0):
                choices = np.array([rng.choice(labels) for labels in kept])
                assert total_cost(flat.graph, flat.unary, flat.tables, choices) >= 0.5 * flat.penalty, seed
            continue
        small = restriction.flat
        decided += len(small.graph.arity) < len(flat.graph.arity)
        assert allowed[restriction.entries[restriction.left]].all()
        assert len(restriction.messages) == message_entries(small.graph)
        for _ in range(20):
            choices = _any_left(restriction, rng)
            original = restriction.original(choices, flat.graph.offset)
            cost = total_cost(flat.graph, flat.unary, flat.tables, original)
            assert total_cost(small.graph, small.unary, small.tables, choices) == pytest.approx(cost, rel=1e-9), seed
            usage = usage_of(small.graph, small.usage, choices)
            assert (usage == usage_of(flat.graph, flat.usage, original)).all(), seed
    assert emptied > 20
    assert decided > 30


@pytest.mark.parametrize("keep", [restrict, narrow])
def test_what_a_restriction_drops_is_forbidden(keep) -> None:
    rng = np.random.default_rng(1)
    dropped = 0
    for seed, _, flat in _flat_problems(300):
        allowed = rng.random(len(flat.unary)) < 0.8
        restriction = keep(flat, allowed)
        if restriction is None:
            continue
        missing = allowed.copy()
        missing[restriction.entries[restriction.left]] = False
        for entry in np.flatnonzero(missing):
            node = int(np.searchsorted(flat.graph.offset, entry, side="right")) - 1
            dropped += 1
            for _ in range(10):
                choices = restriction.original(_any_left(restriction, rng), flat.graph.offset)
                choices[node] = entry - flat.graph.offset[node]
                assert total_cost(flat.graph, flat.unary, flat.tables, choices) >= 0.5 * flat.penalty, seed
    assert dropped > 10


def test_integer_bounds_and_what_strategies_cost_beyond_them() -> None:
    rng = np.random.default_rng(2)
    checked = 0
    for seed, problem, flat in _flat_problems(300):
        if not holds_exact_costs(flat) or _optimum(seed) is None:
            continue
        scale = 10.0 ** rng.uniform(-1, 4)
        prices = rng.random(len(flat.usage.limit)) * 10.0 ** rng.uniform(-2, 1)
        found = integer_bound(flat, prices, scale * rng.standard_normal(message_entries(flat.graph)))
        assert found is not None
        best_with = _best_cost_per_strategy(problem, flat)
        for entry, cost in best_with.items():
            assert found.total + int(found.excess[entry]) <= cost * found.scale, seed
            assert found.bound <= cost, seed
            if found.excess[entry] >= found.hopeless_from(cost + 1):
                raise AssertionError(f"seed {seed}: strategy {entry} belongs to an assignment of cost {cost}")
            checked += 1
    assert checked > 500


def _best_cost_per_strategy(problem: StrategyProblem, flat: FlatProblem) -> dict[int, int]:
    """Cost of the best feasible assignment that has a strategy, by enumeration of a sample."""
    rng = np.random.default_rng(0)
    best: dict[int, int] = {}
    for _ in range(40):
        choices = np.array([rng.integers(size) for size in flat.graph.sizes])
        report = check(problem, flat.original_choices(choices))
        if report.ok:
            assert report.objective is not None
            for entry in (flat.graph.offset[:-1] + choices).tolist():
                best[entry] = min(best.get(entry, report.objective), report.objective)
    return best


def test_without_limits_and_with_huge_costs_nothing_wrong_is_claimed() -> None:
    for seed in range(100):
        problem = random_problem(seed)
        free = with_limits(problem, [None] * len(problem.resources))
        optimum = brute_force.solve(free, SolveOptions(), _nothing, _nothing).bound
        claim, _ = _solve(free, 20)
        if optimum is not None and claim.bound is not None:
            assert claim.bound <= optimum, seed
        assert optimum is None or not claim.proved_infeasible, seed
