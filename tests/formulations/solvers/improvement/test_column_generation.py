"""Columns of repeated blocks against enumeration, and the parts of the solver against their definitions."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.problems.random_problems import random_problem
from support.tiers import fuzz

from formulations.encodings.flat import flatten, message_entries
from formulations.presolve import is_deep, sequence
from formulations.problem.checker import check, usage_profile
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status
from formulations.problem.strategy_problem import (
    BoolArray,
    Factor,
    IntArray,
    Node,
    Resource,
    StrategyProblem,
    UsageTerm,
)
from formulations.solvers import SolverPool, solve
from formulations.solvers.columns import generation as block_columns
from formulations.solvers.columns import restricted_master as block_master
from formulations.solvers.columns.repeated_blocks import find_repeats
from formulations.solvers.columns.restricted_master import mix_patterns, used_strategies
from formulations.solvers.columns.tied_prices import carry_messages_over, inner_groups
from formulations.solvers.columns.tied_problem import TyingError, tie_nodes
from formulations.solvers.exact import brute_force
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.dual_bound import exact_bound
from formulations.solvers.reference import tree_dp
from formulations.solvers.running import lanes as portfolio_lanes
from formulations.solvers.running.lanes import BLOCKS, PRICES, PRICES_AND_BRANCH, PROOF, lanes_for
from formulations.solvers.running.members import Members
from formulations.solvers.running.tunables import HEAD_START_SECONDS, LEAST_NODES_OF_COLUMNS

LAYERS = 5
SEEDS = 40
PERIOD = 2


def layered_problem(seed: int, layers: int = LAYERS, forbidden_share: float = 0.1) -> StrategyProblem:
    """Equal layers of two forward nodes and a backward one, between a head and a tail of their own.

    What a forward node holds lives until the backward node of its layer; the limit lies between the smallest and the
    largest peak of forty random assignments.
    """
    rng = np.random.default_rng(seed)
    horizon = 3 * layers + 2
    costs = [rng.integers(0, 60, 2) for _ in range(3)]
    held = [rng.integers(0, 50, 2) for _ in range(3)]
    tables = {pair: _table(rng, forbidden_share) for pair in ((0, 1), (1, 0), (0, 2), (1, 2), (2, 2))}
    nodes = [Node("head", rng.integers(0, 60, 3), None, (UsageTerm(0, 0, horizon, rng.integers(0, 20, 3)),))]
    for k in range(layers):
        back = horizon - 2 - k
        nodes += [
            Node(f"{k}.{o}", costs[o], None, (UsageTerm(0, 1 + 2 * k + o, back + 1, held[o]),)) for o in range(PERIOD)
        ]
    for k in reversed(range(layers)):
        back = horizon - 2 - k
        nodes.append(Node(f"{k}.back", costs[2], None, (UsageTerm(0, back, back + 2, held[2]),)))
    factors = [Factor((0, 1), rng.integers(0, 60, (3, 2)))]
    for k in range(layers):
        first, second, back = 1 + 2 * k, 2 + 2 * k, 1 + 2 * layers + (layers - 1 - k)
        own = [((first, second), (0, 1)), ((first, back), (0, 2)), ((second, back), (1, 2))]
        if k + 1 < layers:
            own += [((second, second + 1), (1, 0)), ((back - 1, back), (2, 2))]
        factors += [Factor(scope, *tables[kind]) for scope, kind in own]
    problem = StrategyProblem(f"layers-{seed}", tuple(nodes), tuple(factors), (Resource("memory", None),), horizon)
    drawn = [[int(rng.integers(node.size)) for node in nodes] for _ in range(40)]
    peaks = sorted(int(usage_profile(problem, choices)[0].max()) for choices in drawn)
    limit = int(peaks[0] + rng.uniform(-0.1, 0.8) * (peaks[-1] - peaks[0]))
    limited = replace(problem, resources=(Resource("memory", limit),))
    limited.validate()
    return limited


def _table(rng: np.random.Generator, forbidden_share: float) -> tuple[IntArray, BoolArray]:
    forbidden = rng.random((2, 2)) < forbidden_share
    forbidden[0, 0] = False
    return rng.integers(0, 40, (2, 2)), forbidden


@cache
def _optimum(seed: int) -> int | None:
    return brute_force.solve(layered_problem(seed), SolveOptions(), _nothing, _nothing).bound


def _nothing(_: object) -> None:
    return None


def _solved(seed: int, pool: SolverPool, progress: list[Progress] | None = None) -> SolveResult:
    options = SolveOptions(time_limit=30.0, iteration_limit=30)
    return solve(layered_problem(seed), "blocks", options, None if progress is None else progress.append, pool)


@pytest.mark.slow
def test_bound_optimum_incumbent(pool: SolverPool) -> None:
    found, best, tight, feasible = 0, 0, 0, 0
    for seed in range(SEEDS):
        optimum = _optimum(seed)
        progress: list[Progress] = []
        result = _solved(seed, pool, progress)
        if optimum is None:
            assert result.choices is None, seed
            continue
        feasible += 1
        assert result.status not in (Status.INFEASIBLE, Status.INFEASIBLE_UNCONFIRMED), seed
        assert all(entry.bound is None or entry.bound <= optimum for entry in progress), seed
        assert result.bound is not None, seed
        tight += result.bound >= optimum - 0.05 * abs(optimum)
        if result.objective is not None:
            assert result.objective >= optimum, seed
            found += 1
            best += result.objective == optimum
    assert feasible >= 0.6 * SEEDS
    assert found >= 0.9 * feasible
    assert best >= 0.7 * feasible
    assert tight >= 0.6 * feasible


def test_deterministic_with_an_iteration_limit(pool: SolverPool) -> None:
    first, second = _solved(3, pool), _solved(3, pool)
    assert (first.choices, first.bound) == (second.choices, second.bound)


def test_a_master_that_is_too_large_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_master, "MOST_COLUMNS", 0)
    outcomes = set()
    for seed in range(10):
        problem = layered_problem(seed)
        every: BoolArray = np.ones(sum(node.size for node in problem.nodes), dtype=np.bool_)
        outcomes.add(mix_patterns(problem, every, None, SolveOptions(), deadline=np.inf))
    assert (None, False) in outcomes


def test_a_mixture_is_not_looked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    masters: list[BoolArray] = []
    rounds = 0

    def counted(problem: StrategyProblem, used: BoolArray, *rest: Any) -> tuple[tuple[int, ...] | None, bool]:
        masters.append(used)
        return mix_patterns(problem, used, *rest)

    monkeypatch.setattr(block_columns, "mix_patterns", counted)
    for seed in range(20):
        first = len(masters)
        claim = block_columns.solve(
            layered_problem(seed), SolveOptions(time_limit=60.0, iteration_limit=8), _nothing, _nothing
        )
        if claim.message.endswith("rounds"):
            rounds += int(claim.message.split()[2])
        assert all((later & ~before).any() for before, later in pairwise(masters[first:])), seed
    assert 5 < len(masters) < rounds


@pytest.mark.slow
def test_deterministic_whatever_the_process_did_before() -> None:
    options = SolveOptions(time_limit=600.0, iteration_limit=8)  # not reached: a master takes seconds
    seen: list[list[tuple[int, ...]]] = [[], []]
    for incumbents in seen:
        block_columns.solve(layered_problem(0, 60), options, lambda _: None, incumbents.append)
    assert seen[0] == seen[1] != []


def test_the_portfolio_begins_with_blocks_on_a_deep_problem(pool: SolverPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "DEEP_ENTRIES", 0)
    monkeypatch.setattr(sequence, "DEEP_SHARING", 2)
    columns = 0
    for seed in range(12):
        problem, optimum = layered_problem(seed), _optimum(seed)
        assert is_deep(problem)
        result = solve(problem, "portfolio", SolveOptions(time_limit=30.0, iteration_limit=30), None, pool)
        columns += "blocks: " in result.message
        assert (result.choices is None) == (optimum is None), seed
        if optimum is not None:
            assert result.objective is not None
            assert result.bound is not None
            assert result.bound <= optimum <= result.objective <= 1.05 * optimum, seed
    assert columns >= 3


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_columns_come_before_prices_where_most_nodes_repeat(workers: int) -> None:
    options = SolveOptions(workers=workers)
    layers = LEAST_NODES_OF_COLUMNS // 3 + 1
    lanes = lanes_for(layered_problem(0, layers), options)
    search = [turn.solver for turn in lanes[0]]
    assert search.index(BLOCKS) < search.index(PRICES)
    exact = next(turn for lane in lanes for turn in lane if turn.solver == PROOF)
    assert exact.head_start == (HEAD_START_SECONDS if workers > 1 else 0.0)


@pytest.mark.parametrize("problem", [layered_problem(0, LEAST_NODES_OF_COLUMNS // 4), random_problem(5)])
def test_small_problems_and_those_without_blocks_need_no_columns(problem: StrategyProblem) -> None:
    lanes = lanes_for(problem, SolveOptions(workers=2))
    assert BLOCKS not in [turn.solver for lane in lanes for turn in lane]
    assert lanes[0][0].head_start == 0.0


@pytest.mark.parametrize("workers", [1, fuzz(2)])
def test_the_portfolio_with_columns_finds_the_optimum(
    workers: int, pool: SolverPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another process, which may prove the optimum first, columns begin; alone, they end."""
    monkeypatch.setattr(portfolio_lanes, "repeats_mostly", _any_repeats)
    begun: list[str] = []

    def start(members: Members, solver: str, *rest: Any) -> None:
        begun.append(solver)
        members_start(members, solver, *rest)

    members_start = Members.start
    monkeypatch.setattr(Members, "start", start)
    columns = 0
    for seed in range(24):
        result = solve(layered_problem(seed), "portfolio", SolveOptions(time_limit=60.0, workers=workers), None, pool)
        columns += "blocks: " in result.message
        optimum = _optimum(seed)
        assert result.status is (Status.INFEASIBLE if optimum is None else Status.OPTIMAL), (seed, result.message)
        assert result.objective == optimum, seed
    assert begun.count(BLOCKS) >= 3
    assert columns >= 3 or workers > 1


def _any_repeats(problem: StrategyProblem) -> bool:
    return find_repeats(problem).count > 0


def test_declines_where_nothing_repeats(pool: SolverPool) -> None:
    result = solve(random_problem(5), "blocks", SolveOptions(time_limit=10.0), None, pool)
    assert result.status is Status.NO_SOLUTION
    assert "no blocks repeat" in result.message


@pytest.mark.parametrize("layers", [4, 9])
@pytest.mark.parametrize("seed", range(5))
def test_an_orbit_is_one_node_layer_by_layer(layers: int, seed: int) -> None:
    problem = layered_problem(seed, layers, forbidden_share=0.0)
    repeats = find_repeats(problem)
    inner = [i for i, orbit in enumerate(repeats.orbit.tolist()) if orbit >= 0]
    assert len(inner) >= 3 * (layers - 2)
    assert set(repeats.family[inner].tolist()) == {0}
    suffixes: dict[int, set[str]] = {}
    shifts: dict[int, set[int]] = {}
    for i in inner:
        layer, _, suffix = problem.nodes[i].name.partition(".")
        suffixes.setdefault(int(repeats.orbit[i]), set()).add(suffix)
        shifts.setdefault(int(repeats.orbit[i]), set()).add(int(repeats.position[i]) - int(layer))
    assert all(len(own) == 1 for own in suffixes.values())
    assert all(len(own) == 1 for own in shifts.values())
    for factor in problem.factors:
        if all(repeats.orbit[i] >= 0 for i in factor.scope):
            assert np.ptp(repeats.position[list(factor.scope)]) <= 1


def test_inner_blocks_are_tied_and_the_ends_are_not() -> None:
    problem = layered_problem(0, 9)
    groups = inner_groups(find_repeats(problem))
    by_name = dict(zip((node.name for node in problem.nodes), groups.tolist(), strict=True))
    assert by_name["4.0"] == by_name["6.0"]
    assert by_name["3.0"] == by_name["5.0"]
    others = ("0.0", "3.0", "4.0", "8.0", "4.1", "4.back", "head")
    assert len({by_name[name] for name in others}) == len(others)


def test_a_tied_assignment_costs_and_uses_what_the_lifted_one_does() -> None:
    collapsed = 0
    for seed in range(300):
        problem = random_problem(seed)
        if max(int(np.abs(table.cost).max()) for table in (*problem.nodes, *problem.factors)) > 10**16:
            continue
        rng = np.random.default_rng(seed)
        by_size = [node.size * 2 + int(rng.integers(2)) for node in problem.nodes]
        groups = np.unique(by_size, return_inverse=True)[1]
        tied = tie_nodes(problem, groups.astype(np.int64))
        tied.problem.validate()
        collapsed += sum(len(own.scope) for own in tied.problem.factors) < sum(
            len(own.scope) for own in problem.factors
        )
        for _ in range(5):
            choices = tuple(int(rng.integers(node.size)) for node in tied.problem.nodes)
            own, lifted = check(tied.problem, choices), check(problem, tied.lift(choices))
            assert own.ok == lifted.ok, seed
            assert own.objective == lifted.objective, seed
            profiles = usage_profile(tied.problem, choices), usage_profile(problem, tied.lift(choices))
            assert all((a == b).all() for a, b in zip(*profiles, strict=True)), seed
    assert collapsed >= 50


def test_what_cannot_be_tied_is_named() -> None:
    nodes = (Node("two", np.zeros(2, np.int64)), Node("three", np.zeros(3, np.int64)))
    problem = StrategyProblem("unequal", nodes, (), (), 1)
    with pytest.raises(TyingError, match="two 2, three 3"):
        tie_nodes(problem, np.zeros(2, np.int64))
    huge = replace(problem, nodes=tuple(Node(str(i), np.full(2, 2**61, np.int64)) for i in range(3)))
    with pytest.raises(TyingError, match="coarser time quantum"):
        tie_nodes(huge, np.zeros(3, np.int64))


def test_the_master_finds_the_best_mixture() -> None:
    solved = 0
    for seed in range(30):
        problem = layered_problem(seed)
        rng = np.random.default_rng(seed)
        columns = [tuple(int(rng.integers(node.size)) for node in problem.nodes) for _ in range(2)]
        used = [
            np.isin(np.arange(node.size), own) for node, own in zip(problem.nodes, np.transpose(columns), strict=True)
        ]
        nodes = tuple(replace(node, forbidden=~own) for node, own in zip(problem.nodes, used, strict=True))
        optimum = brute_force.solve(replace(problem, nodes=nodes), SolveOptions(), _nothing, _nothing).bound
        found, is_complete = mix_patterns(
            problem, used_strategies(problem, columns), None, SolveOptions(), deadline=np.inf
        )
        assert is_complete
        assert (found is None) == (optimum is None), seed
        if found is not None:
            assert all(own[choice] for own, choice in zip(used, found, strict=True)), seed
            assert check(problem, found).objective == optimum, seed
            solved += 1
    assert solved >= 7


def test_an_orbit_that_no_factor_links_lies_beside_its_run():
    """Pairs of nodes repeat; only the first of each is linked to the heaviest run, which is placed first."""
    blocks = 8
    heavy = [Node(f"heavy {k}", np.arange(9)) for k in range(blocks)]
    pairs = [Node(f"{k} {size}", np.arange(size)) for k in range(blocks) for size in (3, 2)]
    links = [Factor((k, blocks + 2 * k), np.ones((9, 3), dtype=np.int64)) for k in range(blocks)]
    repeats = find_repeats(StrategyProblem("pairs", (*heavy, *pairs), tuple(links), (), 1))
    assert repeats.count == 3 * blocks
    assert set(repeats.family.tolist()) == {0}
    assert repeats.position[blocks::2].tolist() == repeats.position[blocks + 1 :: 2].tolist()
    assert len(set(inner_groups(repeats).tolist())) == 3 * 4


def free_problem(seed: int, layers: int) -> StrategyProblem:
    limited = layered_problem(seed, layers, 0.0)
    return replace(limited, resources=tuple(replace(resource, limit=None) for resource in limited.resources))


@pytest.mark.parametrize("limited", [True, False])
def test_a_deep_problem_begins_with_columns(limited):
    problem = layered_problem(0) if limited else free_problem(0, LAYERS)
    first, *others = lanes_for(problem, SolveOptions(workers=2), deep=True)
    assert first[0].solver == BLOCKS
    assert [turn.solver for lane in others for turn in lane] == [PRICES_AND_BRANCH if limited else PRICES]
    (alone,) = lanes_for(problem, SolveOptions(workers=1), deep=True)
    assert [turn.solver for turn in alone][:2] == [BLOCKS, PRICES]


def test_large_tables_of_a_deep_problem_are_held_once(monkeypatch):
    monkeypatch.setattr(portfolio_lanes, "LARGE_ENTRIES", 10)
    (lane,) = lanes_for(layered_problem(0), SolveOptions(workers=2), deep=True)
    assert [turn.solver for turn in lane][:2] == [BLOCKS, PRICES]


def test_messages_carried_over_add_up_to_those_of_the_tied_problem():
    problem = free_problem(1, 9)
    groups = inner_groups(find_repeats(problem))
    coarse, fine = flatten(tie_nodes(problem, groups).problem), flatten(problem)
    messages = np.random.default_rng(0).normal(size=message_entries(coarse.graph))
    carried = carry_messages_over(coarse, messages, fine, groups)
    totals = np.zeros_like(messages)
    for f, own in enumerate(fine.groups):
        within = [groups[i] for i in own.scope]
        (c,) = (k for k, other in enumerate(coarse.groups) if sorted(within) == list(other.scope))
        for axis, i in enumerate(own.scope):
            start = fine.graph.message_start[f, axis]
            target = coarse.graph.message_start[c, coarse.groups[c].scope.index(groups[i])]
            size = fine.graph.sizes[i]
            totals[target : target + size] += carried[start : start + size]
    assert np.allclose(totals, messages)


def test_messages_of_few_layers_are_a_better_start_for_all_of_them():
    gains = []
    for seed in range(12):
        problem = free_problem(seed, 60)
        optimum = tree_dp.solve(problem, SolveOptions(), _nothing, _nothing).bound
        groups = inner_groups(find_repeats(problem))
        coarse, fine = flatten(tie_nodes(problem, groups).problem), flatten(problem)
        tied = PriceAscent(coarse)
        tied.sweeps(20)
        bounds = []
        for messages in (
            np.zeros(message_entries(fine.graph)),
            carry_messages_over(coarse, tied.messages, fine, groups),
        ):
            ascent = PriceAscent(fine)
            ascent.start_from(ascent.prices, messages)
            ascent.sweeps(2)
            bounds.append(exact_bound(problem, fine, ascent.best_prices, ascent.best_messages))
        assert max(bounds) <= optimum, seed
        gains.append(bounds[1] - bounds[0])
    assert np.mean(gains) > 0


def test_without_limits_one_pattern_of_the_tied_problem_is_the_best(monkeypatch):
    """Layers that are all alike do best what all others do, but for the ends; the master is left out."""
    monkeypatch.setattr(block_columns, "_MIXING", False)
    best = 0
    for seed in range(12):
        problem = free_problem(seed, 30)
        optimum = tree_dp.solve(problem, SolveOptions(), _nothing, _nothing).bound
        assert optimum is not None
        claim = block_columns.solve(problem, SolveOptions(time_limit=5, iteration_limit=6), _nothing, _nothing)
        assert claim.choices is not None
        assert claim.bound is not None
        assert claim.bound <= optimum
        objective = check(problem, claim.choices).objective
        assert objective is not None
        assert objective <= 1.01 * optimum, seed
        best += objective == optimum
    assert best >= 10
