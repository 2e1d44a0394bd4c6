"""Fronts of small components and merged isolated nodes: against enumeration, there and back."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from support.problems.isolated_problems import isolated_problem
from support.problems.random_problems import random_problem, relabelled, with_limits

from formulations.presolve import REDUCTIONS, presolve
from formulations.presolve.reductions import component_fronts, component_states
from formulations.presolve.reductions.component_states import pareto_front
from formulations.presolve.workspace.component_parts import Front, Part, components
from formulations.presolve.workspace.state import Workspace
from formulations.problem.checker import check, usage_profile
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import Factor, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.exact import brute_force

PROBLEMS = 1200
OWN = ("component_fronts", "isolated_nodes")
COMBINATIONS = {"fronts": OWN[:1], "isolated": OWN[1:], "both": OWN, "all": tuple(REDUCTIONS)}


def best_of(problem: StrategyProblem) -> tuple[int, tuple[int, ...]] | None:
    if not problem.nodes:
        return 0, ()
    claim = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None)
    return None if claim.choices is None or claim.bound is None else (claim.bound, claim.choices)


@cache
def optimum(seed: int) -> int | None:
    best = best_of(isolated_problem(seed))
    return None if best is None else best[0]


def judge(problem: StrategyProblem, expected: int | None, reductions: tuple[str, ...]) -> int:
    """The lifted optimum is the optimum; returns how many nodes are gone."""
    result = presolve(problem, reductions)
    result.problem.validate()
    best = None if result.contradiction else best_of(result.problem)
    if best is None:
        assert expected is None, problem.name
        return 0
    assert best[0] + result.offset == expected, problem.name
    report = check(problem, result.lift(best[1]), expected)
    assert report.ok, (problem.name, report.violations)
    return result.before.nodes - result.after.nodes


@pytest.mark.parametrize("name", COMBINATIONS)
def test_lifted_optimum_is_the_optimum(name: str) -> None:
    removed = [judge(isolated_problem(seed), optimum(seed), COMBINATIONS[name]) for seed in range(PROBLEMS)]
    assert sum(count > 0 for count in removed) > PROBLEMS / 10


def test_the_family_has_what_it_promises() -> None:
    optima = [optimum(seed) for seed in range(PROBLEMS)]
    assert 50 < sum(value is None for value in optima) < PROBLEMS / 2
    assert sum(value is not None and abs(value) > 2**63 for value in optima) > 30


def test_order_of_nodes_and_strategies_does_not_matter() -> None:
    for seed in range(400):
        judge(relabelled(isolated_problem(seed), seed), optimum(seed), OWN)


def test_every_choice_lifts_to_its_cost_and_comes_back() -> None:
    rng = np.random.default_rng(0)
    compared = 0
    for seed in range(600):
        problem = isolated_problem(seed)
        for reductions in (OWN, tuple(REDUCTIONS)):
            result = presolve(problem, reductions)
            if result.contradiction:
                continue
            for _ in range(4):
                choices = tuple(int(rng.integers(node.size)) for node in result.problem.nodes)
                reduced, lifted = check(result.problem, choices), check(problem, result.lift(choices))
                assert reduced.ok <= lifted.ok, seed
                if reduced.ok:
                    assert reduced.objective is not None
                    assert lifted.objective == reduced.objective + result.offset, seed
                    assert result.lift.project(result.lift(choices)) == choices, seed
                    compared += 1
    assert compared > 1000


def test_whatever_is_projected_is_no_worse() -> None:
    """A start that the fronts have no strategy for becomes one that beats it."""
    rng = np.random.default_rng(1)
    better = 0
    for seed in range(600):
        problem = isolated_problem(seed)
        result = presolve(problem, OWN)
        for _ in range(4):
            choices = tuple(int(rng.integers(node.size)) for node in problem.nodes)
            before = check(problem, choices)
            if result.contradiction or not before.ok:
                continue
            projected = result.lift.project(choices)
            assert projected is not None
            after = check(problem, result.lift(projected))
            assert after.ok
            assert before.objective is not None
            assert after.objective is not None
            assert after.objective <= before.objective
            better += after.objective < before.objective
    assert better > 20


def test_fronts_are_those_of_enumeration() -> None:
    compared = 0
    for seed in range(400):
        work = Workspace(isolated_problem(seed))
        if work.contradiction:
            continue
        for component in components(work):
            part = Part.of(work, component)
            front = pareto_front(part, 1 << 20)
            assert front is not None
            found = {
                (int(c), *map(int, level)) for c, level in zip(front.cost, front.amounts @ part.covers, strict=True)
            }
            assert len(found) == len(front.cost)
            assert found == enumerated_front(part)
            compared += len(component) > 1
    assert compared > 200


def enumerated_front(part: Part) -> set[tuple[int, ...]]:
    points = set()
    for choice in itertools.product(*(range(len(cost)) for cost in part.cost)):
        cost = sum(int(own[s]) for own, s in zip(part.cost, choice, strict=True))
        amounts = sum(own[s] for own, s in zip(part.amounts, choice, strict=True))
        allowed = True
        for coupling in part.couplings:
            index = tuple(choice[k] for k in coupling.scope)
            cost += int(coupling.cost[index])
            amounts = amounts + coupling.amounts[index]
            allowed &= coupling.forbidden is None or not coupling.forbidden[index]
        if allowed:
            points.add((cost, *map(int, amounts @ part.covers)))
    return {p for p in points if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)}


def layers(count: int, strategies: int = 2, apart: int = 0) -> StrategyProblem:
    """Equal triangles of nodes with powers of two as amounts; layer ``k`` runs ``k * apart`` times later."""
    rng = np.random.default_rng(0)
    shape = (strategies, strategies)
    halves = 2 ** np.arange(strategies, dtype=np.int64)[::-1]
    costs = [np.sort(rng.integers(0, 100, strategies)) for _ in range(3)]
    tables = [rng.integers(0, 50, shape) for _ in range(3)]
    nodes: list[Node] = []
    factors: list[Factor] = []
    for layer in range(count):
        first, start = len(nodes), layer * apart
        nodes += [
            Node(f"n{first + k}", cost, None, (UsageTerm(0, start, start + 2, halves),)) for k, cost in enumerate(costs)
        ]
        pairs = ((first, first + 1), (first + 1, first + 2), (first, first + 2))
        factors += [Factor(pair, table) for pair, table in zip(pairs, tables, strict=True)]
    problem = StrategyProblem(
        f"layers-{count}", tuple(nodes), tuple(factors), (Resource("device", None),), count * apart + 2
    )
    cheapest = [0] * len(nodes)
    return with_limits(problem, [int(usage_profile(problem, cheapest)[0].max() * 0.6)])


def test_equal_components_at_one_time_are_one_decision() -> None:
    result = presolve(layers(30))
    assert result.after.nodes <= 5
    assert result.after.factors == 0
    rng = np.random.default_rng(0)
    for _ in range(20):
        choices = tuple(int(rng.integers(node.size)) for node in result.problem.nodes)
        reduced, lifted = check(result.problem, choices), check(layers(30), result.lift(choices))
        assert reduced.ok == lifted.ok


def test_equal_components_share_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(component_states, "pareto_front", lambda *args: calls.append(args) or pareto_front(*args))
    result = presolve(layers(50, apart=1), OWN[:1])
    assert result.after.nodes == 50
    assert len(calls) == 1


def test_a_front_is_computed_once_however_often_reductions_come_by(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[bytes] = []
    asked: list[bytes] = []

    def counted(part: Part, most: int) -> Front | None:
        computed.append(part.digest())
        return pareto_front(part, most)

    def counted_question(work: Workspace, part: Part, most: int) -> Front | None:
        asked.append(part.digest())
        return component_states.front_of(work, part, most)

    monkeypatch.setattr(component_states, "pareto_front", counted)
    monkeypatch.setattr(component_fronts, "front_of", counted_question)
    for seed in range(40):
        computed.clear()
        work = Workspace(random_problem(seed))
        for _ in range(3):
            component_fronts.reduce(work)
        assert len(computed) == len(set(computed)), seed
    assert len(asked) > len(set(asked)), "some parts stay as they are, and are met again"


def test_nothing_becomes_larger() -> None:
    compared = 0
    for seed in range(600):
        problem = isolated_problem(seed)
        if max(int(node.cost.max()) for node in problem.nodes) > 100:
            continue  # costs beyond int64 are split over several factors
        for name in OWN:
            before, after = (result := presolve(problem, (name,))).before, result.after
            constant = result.problem.nodes[-1:] and result.problem.nodes[-1].name == "(constant usage)"
            assert after.nodes - bool(constant) <= before.nodes
            assert after.strategies - bool(constant) + after.entries <= before.strategies + before.entries
            compared += bool(result.steps)
    assert compared > 100


def test_a_front_that_explodes_is_left_alone() -> None:
    primes = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)
    usage = [(UsageTerm(0, 0, 1, np.array([0, 1 << p])),) for p in primes]
    nodes = tuple(Node(f"n{p}", np.array([1 << p, 0]), None, own) for p, own in zip(primes, usage, strict=True))
    chain = tuple(Factor((i, i + 1), np.array([[0, 1], [1, 0]])) for i in range(len(nodes) - 1))
    for factors in ((), chain):
        problem = StrategyProblem("powers", nodes, factors, (Resource("device", 1 << 29),), 1)
        assert presolve(problem, OWN).after.nodes == len(nodes)


def test_a_component_without_allowed_choice_is_named() -> None:
    usage = (UsageTerm(0, 0, 1, np.array([1, 2])),)
    nodes = tuple(Node(f"n{i}", np.array([0, 0]), None, usage) for i in range(3))
    equal, unequal = np.array([[True, False], [False, True]]), np.array([[False, True], [True, False]])
    flags = ((0, 1), unequal), ((1, 2), unequal), ((0, 2), equal)
    factors = tuple(Factor(scope, np.zeros((2, 2), np.int64), forbidden) for scope, forbidden in flags)
    problem = StrategyProblem("odd", nodes, factors, (Resource("device", 9),), 1)
    assert "around node n0" in presolve(problem, OWN).contradiction
