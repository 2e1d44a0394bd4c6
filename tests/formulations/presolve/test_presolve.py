"""Presolve on its own: every reduction, and all together, leave the optimum as it is, and shrink what they should."""

from __future__ import annotations

import itertools
import math
import time
from functools import cache

import numpy as np
import pytest
from support.problems.isolated_problems import isolated_problem
from support.problems.random_problems import random_problem, relabelled, with_limits
from support.tiers import first

from formulations.presolve import REDUCTIONS, Presolved, presolve
from formulations.presolve.first_pass import REPLACES, FirstPass
from formulations.presolve.workspace.export import export
from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import Factor, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.exact import brute_force

PROBLEMS = 1000
BATCHES = 10
COMBINATIONS = {**{name: (name,) for name in REDUCTIONS}, "all": tuple(REDUCTIONS)}


def best_of(problem: StrategyProblem) -> tuple[int, tuple[int, ...]] | None:
    """The optimum by enumeration, or None where nothing is feasible."""
    if not problem.nodes:
        return 0, ()
    claim = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None)
    return None if claim.choices is None or claim.bound is None else (claim.bound, claim.choices)


@cache
def optimum(seed: int) -> int | None:
    best = best_of(random_problem(seed))
    return None if best is None else best[0]


def judge(problem: StrategyProblem, expected: int | None, result: Presolved) -> None:
    """The reduced problem has the same optimum, and its lifted optimum costs just that."""
    result.problem.validate()
    best = None if result.contradiction else best_of(result.problem)
    if best is None:
        assert expected is None, problem.name
        return
    cost, choices = best
    assert cost + result.offset == expected, problem.name
    report = check(problem, result.lift(choices), expected)
    assert report.ok, (problem.name, report.violations)


@pytest.mark.parametrize("batch", first(BATCHES // 2, range(BATCHES)))
@pytest.mark.parametrize("name", COMBINATIONS)
def test_lifted_optimum_is_the_optimum(name: str, batch: int) -> None:
    size = PROBLEMS // BATCHES
    for seed in range(batch * size, (batch + 1) * size):
        judge(random_problem(seed), optimum(seed), presolve(random_problem(seed), COMBINATIONS[name]))


def tied_problem(seed: int) -> StrategyProblem:
    """Small graphs most of whose tables are functions of one side: both ways round, parallel, in circles, and apart."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    sizes = rng.choice([1, 2, 2, 3, 3, 4], count)
    horizon = 6

    def usage(shape: tuple[int, ...]) -> tuple[UsageTerm, ...]:
        start, end = sorted(rng.integers(0, horizon + 1, 2).tolist())
        return (UsageTerm(0, start, end, rng.integers(0, 20, shape)),)

    nodes = tuple(
        Node(
            f"n{i}",
            rng.integers(-9, 50, size),
            rng.random(size) < 0.2 if rng.random() < 0.2 else None,
            sum((usage((size,)) for _ in range(rng.integers(0, 3))), ()),
        )
        for i, size in enumerate(sizes.tolist())
    )
    factors = []
    for _ in range(int(rng.integers(0, 2 * count)) if count > 1 else 0):
        arity = int(rng.choice([1, 2, 2, 2, 2, 2, 3][: 7 if count > 2 else 6]))
        scope = tuple(rng.choice(count, arity, replace=False).tolist())
        shape = tuple(int(sizes[i]) for i in scope)
        kind = rng.random()
        flags = None
        if arity == 2 and kind < 0.6:
            flags = np.ones(shape, dtype=np.bool_)
            flags[np.arange(shape[0]), rng.integers(0, shape[1], shape[0])] = False
        elif kind < 0.7:
            flags = rng.random(shape) < 0.3
        cost = rng.integers(-9, 50, shape)
        if arity == 2 and rng.random() < 0.3:
            cost = cost[:, :1] + cost[:1, :]
        factors.append(Factor(scope, cost, flags, usage(shape) if rng.random() < 0.1 else ()))
    problem = StrategyProblem(f"tied-{seed}", nodes, tuple(factors), (Resource("device", None),), horizon)
    return with_limits(problem, [None if rng.random() < 0.2 else int(rng.integers(0, 25 * count))])


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_first_pass_keeps_the_optimum(batch: int) -> None:
    """Alone, with the other reductions, and with everything in another order."""
    merged = 0
    for seed in range(batch * 100, (batch + 1) * 100):
        problem = tied_problem(seed)
        problem.validate()
        best = best_of(problem)
        expected = None if best is None else best[0]
        other = relabelled(problem, seed)
        for given, reductions in ((problem, tuple(REPLACES)), (problem, tuple(REDUCTIONS)), (other, tuple(REDUCTIONS))):
            result = presolve(given, reductions)
            judge(given, expected, result)
            merged += "first_pass" in result.steps
    assert merged > 100


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction_finds_work(name: str) -> None:
    families = random_problem, isolated_problem
    found = sum(bool(presolve(family(seed), (name,)).steps) for family in families for seed in range(200))
    assert found >= 15


def test_every_feasible_choice_lifts_to_its_cost() -> None:
    """Not only the optimum: whatever a heuristic finds in the reduced problem holds in the original one."""
    rng = np.random.default_rng(0)
    compared = 0
    for seed in range(300):
        problem = random_problem(seed)
        result = presolve(problem)
        if result.contradiction:
            continue
        for _ in range(5):
            choices = tuple(int(rng.integers(node.size)) for node in result.problem.nodes)
            reduced, lifted = check(result.problem, choices), check(problem, result.lift(choices))
            assert lifted.ok or not reduced.ok, seed
            if reduced.ok:
                assert reduced.objective is not None
                assert lifted.objective == reduced.objective + result.offset, seed
                assert result.lift(result.lift.project(result.lift(choices)) or ()) == result.lift(choices), seed
                compared += 1
    assert compared > 300


def test_order_of_nodes_and_strategies_does_not_matter() -> None:
    for seed in range(200):
        problem = relabelled(random_problem(seed), seed)
        judge(problem, optimum(seed), presolve(problem))


def tied_chain(length: int, strategies: int, seed: int = 0) -> StrategyProblem:
    """A chain in which each node must take the strategy that a permutation of the one before says."""
    rng = np.random.default_rng(seed)
    nodes = tuple(
        Node(
            f"n{i}",
            rng.integers(0, 100, strategies),
            None,
            (UsageTerm(0, i, i + 3, rng.integers(1, 50, strategies)),),
        )
        for i in range(length)
    )
    factors = []
    for i in range(length - 1):
        forbidden = np.ones((strategies, strategies), dtype=np.bool_)
        forbidden[np.arange(strategies), rng.permutation(strategies)] = False
        factors.append(Factor((i, i + 1), rng.integers(0, 9, forbidden.shape), forbidden))
    problem = StrategyProblem(f"tied-{length}", nodes, tuple(factors), (Resource("device", None),), length + 2)
    return with_limits(problem, [60])


def test_a_tied_chain_is_one_decision() -> None:
    problem = tied_chain(30, 5)
    result = presolve(problem, ("tied_nodes",))
    assert (result.after.nodes, result.after.strategies, result.after.factors) == (1, 5, 0)
    expected = []
    for start in range(5):
        choices = [start]
        for factor in problem.factors:
            assert factor.forbidden is not None
            choices.append(int((~factor.forbidden[choices[-1]]).argmax()))
        report = check(problem, choices)
        if report.ok:
            expected.append(report.objective)
    found = best_of(result.problem)
    assert (None if found is None else found[0] + result.offset) == min(expected, default=None)


def test_many_strategies_that_allow_one_each_are_ties_too() -> None:
    forbidden = np.array([[False, True], [False, True], [True, False]])
    nodes = (Node("wide", np.array([3, 1, 9])), Node("narrow", np.array([5, 2])), Node("end", np.array([0, 0])))
    apart = Factor((2, 1), np.array([[0, 8], [8, 0]]))
    problem = StrategyProblem("function", nodes, (Factor((0, 1), np.zeros((3, 2), np.int64), forbidden), apart), (), 1)
    result = presolve(problem, ("tied_nodes",))
    assert result.after.nodes == 2
    assert [result.lift((s, 0))[1] for s in range(3)] == [0, 0, 1]
    judge(problem, 6, result)


def test_only_times_that_can_exceed_the_limit_are_kept() -> None:
    amounts = np.array([10, 40])
    nodes = tuple(Node(f"n{i}", np.array([5, 0]), None, (UsageTerm(0, 2 * i, 2 * i + 3, amounts),)) for i in range(10))
    problem = StrategyProblem("steps", nodes, (), (Resource("device", 79),), 30)
    result = presolve(problem, ("maximal_times",))
    assert result.problem.horizon == 9
    assert result.problem.resources[0].limit == 79 - 20
    assert presolve(with_limits(problem, [80]), ("maximal_times",)).after.usage_terms == 0
    judge(problem, 5 * 5, result)


def test_without_limits_a_chain_vanishes() -> None:
    rng = np.random.default_rng(0)
    nodes = tuple(Node(f"n{i}", rng.integers(0, 9, 4)) for i in range(60))
    free = StrategyProblem(
        "chain", nodes, tuple(Factor((i, i + 1), rng.integers(0, 9, (4, 4))) for i in range(59)), (), 1
    )
    result = presolve(free)
    assert result.problem.nodes == ()
    assert check(free, result.lift(()), result.offset).ok


def test_contradictions_are_named() -> None:
    usage = (UsageTerm(0, 1, 3, np.array([5, 6])),)
    nodes = tuple(Node(f"n{i}", np.array([1, 2]), None, usage) for i in range(3))
    tight = presolve(StrategyProblem("tight", nodes, (), (Resource("device", 14),), 4))
    assert "at least 15 is used" in tight.contradiction
    assert (tight.problem.nodes, tight.lift((0, 1, 0))) == (nodes, (0, 1, 0))
    blocked = Factor((0, 1), np.zeros((2, 2), np.int64), np.ones((2, 2), np.bool_))
    named = presolve(StrategyProblem("blocked", nodes, (blocked,), (Resource("device", 99),), 4))
    assert "every strategy is forbidden" in named.contradiction


def test_costs_beyond_int64_are_carried_exactly() -> None:
    huge = 9 * 10**18
    tie = np.array([[False, True], [True, False]])
    nodes = tuple(Node(f"n{i}", np.array([huge, huge - 1])) for i in range(8))
    ties = tuple(Factor((i, i + 1), np.zeros((2, 2), np.int64), tie) for i in range(0, 7))
    apart = Factor((0, 7), np.array([[huge, 0], [0, 0]]))
    problem = StrategyProblem("huge", nodes, (*ties, apart), (), 1)
    judge(problem, 8 * huge - 8, presolve(problem, ("tied_nodes",)))
    judge(problem, 8 * huge - 8, presolve(problem))


def test_stops_at_its_deadline_with_a_valid_problem() -> None:
    for seed in range(50):
        problem = random_problem(seed)
        result = presolve(problem, deadline=time.monotonic() - 1)
        assert result.steps == ()
        judge(problem, optimum(seed), result)


def passing_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look at the clock take a second."""
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))


@pytest.mark.parametrize("seconds", [0, *range(1, 60, 3)])
def test_stops_anywhere_with_a_valid_problem(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reductions look at the clock in their loops; wherever it stops them, the optimum is the same."""
    for seed in range(40):
        for problem in (random_problem(seed), tied_problem(seed)):
            best = best_of(problem)
            with monkeypatch.context() as context:
                passing_seconds(context)
                result = presolve(problem, deadline=seconds)
            judge(problem, None if best is None else best[0], result)


def test_the_first_pass_leaves_exact_work_when_cut_short() -> None:
    """One round alone can leave strategies that only the next would have dropped."""
    for seed in range(400):
        problem = tied_problem(seed)
        passes = FirstPass(problem)
        passes.run(deadline=-math.inf)
        work = passes.workspace()
        best = best_of(problem)
        if work.contradiction:
            assert best is None, seed
            continue
        reduced, lift, offset = export(work, problem)
        found = best_of(reduced)
        assert (None if found is None else found[0] + offset) == (None if best is None else best[0]), seed
        if found is not None:
            assert check(problem, lift(found[1]), found[0] + offset).ok, seed


def test_shrinks_a_large_tied_problem_in_seconds() -> None:
    problem = tied_chain(20_000, 8)
    begin = time.process_time()
    result = presolve(problem)
    assert time.process_time() - begin < 15
    assert result.contradiction or result.after.nodes <= 2
