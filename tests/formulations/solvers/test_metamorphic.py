"""What must happen to the optimum when a problem is changed in a way whose effect is known.

No oracle is needed, so some of these problems are larger than enumeration can look at. An exact solver must move as
the relation says; what heuristics and bounds say about the changed problem must hold for the optimum that follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.problems.random_problems import relabelled, scaled, training_step_problem, with_limits
from support.problems.solver_truth import (
    EXACT_UP_TO,
    HEURISTICS,
    Truth,
    fuzz_problem,
    options_for,
    run_solver,
    total_cost,
)
from support.tiers import first

from formulations.problem.solution import SolveResult, Status
from formulations.problem.strategy_problem import Factor, Node, StrategyProblem, UsageTerm
from formulations.solvers import SolverPool, solve

COUNTS = pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.fuzz)])
"""Problems a relation in `make test`, and in `make fuzz`."""
EXACT = ("brute_force", "highs", "cpsat")
LARGEST_AMOUNT = 10**12
"""Amounts beyond this are left alone by relations that multiply them."""


def times_a_thousand(problem: StrategyProblem, seed: int) -> StrategyProblem:
    """All costs become a thousandfold, all amounts and limits sevenfold."""
    return scaled(problem, 1000, 7)


def plus_a_constant(problem: StrategyProblem, seed: int) -> StrategyProblem:
    """Every strategy of one node costs 11 more."""
    first, *others = problem.nodes
    return replace(problem, nodes=(replace(first, cost=first.cost + 11), *others))


def halved_terms(problem: StrategyProblem, seed: int) -> StrategyProblem:
    """Every usage is written down as two, of parts of the amount."""

    def terms(usage: tuple[UsageTerm, ...]) -> tuple[UsageTerm, ...]:
        return tuple(replace(t, amount=a) for t in usage for a in (t.amount // 2, t.amount - t.amount // 2))

    return _with_usage(problem, terms)


def backwards(problem: StrategyProblem, seed: int) -> StrategyProblem:
    """Time runs from the end to the beginning."""

    def terms(usage: tuple[UsageTerm, ...]) -> tuple[UsageTerm, ...]:
        return tuple(replace(t, start=problem.horizon - t.end, end=problem.horizon - t.start) for t in usage)

    return _with_usage(problem, terms)


def with_idle_nodes(problem: StrategyProblem, seed: int) -> StrategyProblem:
    """Two nodes more, tied to each other, that cost nothing and use nothing."""
    count = len(problem.nodes)
    idle = tuple(Node(f"idle{k}", np.zeros(2, dtype=np.int64)) for k in range(2))
    tie = Factor((count + 1, count), np.zeros((2, 2), dtype=np.int64), np.array([[False, True], [True, False]]))
    return replace(problem, nodes=(*problem.nodes, *idle), factors=(tie, *problem.factors))


def split_tables(problem: StrategyProblem, seed: int) -> StrategyProblem:
    """Every factor's cost is divided over two parallel factors, the second with its axes reversed."""
    factors: list[Factor] = []
    for factor in problem.factors:
        half = factor.cost // 2
        factors.append(replace(factor, cost=half))
        factors.append(Factor(factor.scope[::-1], (factor.cost - half).transpose()))
    return replace(problem, factors=tuple(factors))


def _with_usage(
    problem: StrategyProblem, terms: Callable[[tuple[UsageTerm, ...]], tuple[UsageTerm, ...]]
) -> StrategyProblem:
    nodes = tuple(replace(node, usage=terms(node.usage)) for node in problem.nodes)
    factors = tuple(replace(factor, usage=terms(factor.usage)) for factor in problem.factors)
    return replace(problem, nodes=nodes, factors=factors)


Change = Callable[[StrategyProblem, int], StrategyProblem]
RELATIONS: dict[Change, Callable[[int], int]] = {
    relabelled: lambda optimum: optimum,
    times_a_thousand: lambda optimum: 1000 * optimum,
    plus_a_constant: lambda optimum: optimum + 11,
    halved_terms: lambda optimum: optimum,
    backwards: lambda optimum: optimum,
    with_idle_nodes: lambda optimum: optimum,
    split_tables: lambda optimum: optimum,
}
"""Changes, and what they make of the optimum."""


def fits(problem: StrategyProblem) -> bool:
    """Whether numbers are small enough to be multiplied, and for exact solvers to prove the last unit."""
    largest = max((int(term.amount.max()) for _, term in problem.usage_terms()), default=0)
    return total_cost(problem) <= EXACT_UP_TO // 1000 and largest <= LARGEST_AMOUNT


def problems(first: int, count: int) -> Iterator[tuple[int, StrategyProblem]]:
    fitting = ((seed, fuzz_problem(seed)) for seed in itertools.count(first) if fits(fuzz_problem(seed)))
    return itertools.islice(fitting, count)


def judge(truth: Truth, name: str, result: SolveResult) -> None:
    (truth.judge if name in HEURISTICS else truth.judge_exact)(result)


@pytest.mark.parametrize("change", RELATIONS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ["highs", "cpsat", *HEURISTICS])
@COUNTS
def test_the_optimum_moves_as_it_must(name: str, change: Change, count: int, pool: SolverPool) -> None:
    for seed, problem in problems(30_000, count):
        optimum = Truth.of(problem).optimum
        changed = change(problem, seed)
        changed.validate()
        moved = Truth(changed, None if optimum is None else RELATIONS[change](optimum))
        judge(moved, name, run_solver(name, changed, seed, pool))


@pytest.fixture(scope="module")
def solved(pool: SolverPool) -> list[tuple[StrategyProblem, SolveResult]]:
    """Training steps that are beyond enumeration and some small problems, solved by the portfolio."""
    steps = [training_step_problem(seed, 14, 3, memory=0.4, forbidden_share=0.1) for seed in range(2)]
    small = [problem for _, problem in problems(31_000, 5)]
    return [(problem, by_portfolio(problem, pool)) for problem in (*steps, *small)]


def by_portfolio(problem: StrategyProblem, pool: SolverPool) -> SolveResult:
    return solve(problem, "portfolio", options_for("portfolio", 1), pool=pool)


@pytest.mark.parametrize("change", first(4, RELATIONS), ids=lambda change: change.__name__)
def test_the_portfolios_optimum_moves_as_it_must(
    change: Change, solved: list[tuple[StrategyProblem, SolveResult]], pool: SolverPool
) -> None:
    for seed, (problem, before) in enumerate(solved):
        after = by_portfolio(change(problem, seed), pool)
        assert before.status in (Status.OPTIMAL, Status.INFEASIBLE), problem.name
        assert after.status is before.status, problem.name
        assert after.objective == (None if before.objective is None else RELATIONS[change](before.objective))


@pytest.mark.parametrize("name", [*EXACT, *HEURISTICS])
@COUNTS
def test_a_larger_limit_never_costs_more(name: str, count: int, pool: SolverPool) -> None:
    for seed, problem in problems(32_000, count):
        optimum = Truth.of(problem).optimum
        wider = with_limits(problem, [None if r.limit is None else r.limit + 10 for r in problem.resources])
        result = run_solver(name, wider, seed, pool)
        if optimum is not None:
            assert result.bound is None or result.bound <= optimum, problem.name
            assert name in HEURISTICS or (result.objective is not None and result.objective <= optimum), problem.name


@pytest.mark.parametrize("name", [*EXACT, *HEURISTICS])
@COUNTS
def test_forbidding_never_costs_less(name: str, count: int, pool: SolverPool) -> None:
    for seed, problem in problems(33_000, count):
        optimum = Truth.of(problem).optimum
        last = problem.nodes[-1]
        flags = np.arange(last.size) == 0
        flags |= last.forbidden if last.forbidden is not None else False
        narrower = replace(problem, nodes=(*problem.nodes[:-1], replace(last, forbidden=flags)))
        objective = run_solver(name, narrower, seed, pool).objective
        assert objective is None or (optimum is not None and objective >= optimum), problem.name
