"""Thousands of random problems through every exact solver: all must agree with brute force.

HiGHS and CP-SAT run in warm workers, the others in this process. Where costs are too large for doubles a
solver may leave its bound a little below the optimum, but never above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.random_problems import random_problem, relabelled, scaled, training_step_problem

from formulations.checker import check_result
from formulations.problem import StrategyProblem
from formulations.solution import SolveOptions, SolveResult, Status
from formulations.solvers import SolverPool, solve, solve_in_process

PROBLEMS = 2000
BATCHES = 20
OPTIONS = SolveOptions(time_limit=60)
EXACT_UP_TO = 10**12
"""Sum of all costs up to which every solver must prove the optimum to the last unit."""
LOOSE_GAP = 1e-9
INFEASIBLE = (Status.INFEASIBLE, Status.INFEASIBLE_UNCONFIRMED)


@pytest.fixture(scope="module")
def pool() -> Iterator[SolverPool]:
    with SolverPool() as shared:
        yield shared


@dataclass(frozen=True)
class Truth:
    """A problem and its optimum by brute force, None where nothing is feasible."""

    problem: StrategyProblem
    optimum: int | None

    @classmethod
    def of(cls, problem: StrategyProblem) -> Truth:
        return cls(problem, solve_in_process(problem, "brute_force", OPTIONS).objective)

    def judge_exact(self, result: SolveResult) -> None:
        """An exact solver with time enough proves the optimum, or infeasibility with a witness."""
        where = f"{self.problem.name}, optimum {self.optimum}: {result}"
        self.judge(result)
        if self.optimum is None:
            assert result.status is Status.INFEASIBLE, where
            return
        assert result.objective is not None, where
        assert result.bound is not None, where
        total = _total_cost(self.problem)
        if total <= EXACT_UP_TO:
            assert result.status is Status.OPTIMAL, where
            assert result.objective == self.optimum, where
        assert result.objective - result.bound <= LOOSE_GAP * total, where

    def judge(self, result: SolveResult) -> None:
        """Whatever a solver says must be true."""
        where = f"{self.problem.name}, optimum {self.optimum}: {result}"
        assert check_result(self.problem, result).ok, where
        assert self.optimum is None or result.status not in INFEASIBLE, where
        assert self.optimum is not None or result.choices is None, where
        if self.optimum is not None:
            assert result.bound is None or result.bound <= self.optimum, where
            assert result.objective is None or result.objective >= self.optimum, where
            assert result.status is not Status.OPTIMAL or result.objective == self.optimum, where


def _total_cost(problem: StrategyProblem) -> int:
    tables = [table.cost for table in (*problem.nodes, *problem.factors)]
    return sum(max(abs(int(table.max())), abs(int(table.min()))) for table in tables)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_exact_solvers_agree(batch: int, pool: SolverPool) -> None:
    size = PROBLEMS // BATCHES
    for seed in range(batch * size, (batch + 1) * size):
        known = Truth.of(random_problem(seed))
        known.judge(solve_in_process(known.problem, "tree_dp", OPTIONS))
        known.judge_exact(solve(known.problem, "highs", OPTIONS, pool=pool))
        known.judge_exact(solve(known.problem, "cpsat", OPTIONS, pool=pool))


def test_an_optimum_that_cpsat_got_wrong(pool: SolverPool) -> None:
    """CP-SAT 9.15 with its default presolve certifies 6086985631780834780 here (or-tools issue 5293)."""
    known = Truth.of(random_problem(102_937))
    assert known.optimum == 6_008_562_594_875_551_129
    known.judge_exact(solve(known.problem, "cpsat", OPTIONS, pool=pool))


@pytest.mark.parametrize("name", ["highs_lazily", "cpsat_lazily"])
def test_rows_added_as_they_turn_out_to_matter(name: str, pool: SolverPool) -> None:
    for seed in range(5000, 5150):
        known = Truth.of(random_problem(seed))
        result = solve(known.problem, f"support.fake_solvers:{name}", OPTIONS, pool=pool)
        if known.optimum is None:
            assert result.status is Status.INFEASIBLE, known.problem.name
        else:
            known.judge_exact(result)


def test_pyomo_agrees(pool: SolverPool) -> None:
    for seed in range(6000, 6080):
        known = Truth.of(random_problem(seed))
        known.judge_exact(solve(known.problem, "pyomo", OPTIONS, pool=pool))


def test_another_solver_of_pyomo_agrees(pool: SolverPool) -> None:
    for seed in range(6100, 6110):
        known = Truth.of(random_problem(seed, "tiny"))
        known.judge(solve(known.problem, "pyomo:appsi_highs", OPTIONS, pool=pool))


@pytest.mark.parametrize("name", ["highs", "cpsat"])
def test_relabelling_and_scaling_change_nothing(name: str, pool: SolverPool) -> None:
    for seed in range(7000, 7030):
        problem = random_problem(seed, "tiny")
        if _total_cost(problem) > EXACT_UP_TO or _total_usage(problem) > EXACT_UP_TO:
            continue
        objective = solve(problem, name, OPTIONS, pool=pool).objective
        assert solve(relabelled(problem, seed), name, OPTIONS, pool=pool).objective == objective
        larger = solve(scaled(problem, 1000, 7), name, OPTIONS, pool=pool).objective
        assert larger == (None if objective is None else 1000 * objective)


def test_training_steps_are_proved_by_highs_and_confirmed_by_cpsat(pool: SolverPool) -> None:
    for seed, memory in ((1, 0.8), (2, 0.5), (3, 0.3)):
        problem = training_step_problem(seed, operators=30, strategies=4, memory=memory, forbidden_share=0.1)
        by_highs = solve(problem, "highs", OPTIONS, pool=pool)
        assert by_highs.status is Status.OPTIMAL
        # CP-SAT proves little on one-hot chains; from the optimum on it must at least find nothing better.
        started = SolveOptions(time_limit=5, initial_choices=by_highs.choices)
        by_cpsat = solve(problem, "cpsat", started, pool=pool)
        assert by_cpsat.objective == by_highs.objective
        assert by_cpsat.bound <= by_highs.objective


def test_a_start_is_used_to_fix_columns(pool: SolverPool) -> None:
    problem = training_step_problem(5, operators=60, strategies=5, memory=0.5)
    cold = solve(problem, "highs", OPTIONS, pool=pool)
    warm = solve(problem, "highs", SolveOptions(time_limit=60, initial_choices=cold.choices), pool=pool)
    assert cold.status is warm.status is Status.OPTIMAL
    assert warm.objective == cold.objective


def _total_usage(problem: StrategyProblem) -> int:
    return sum(int(term.amount.max()) for _, term in problem.usage_terms())


@pytest.mark.fuzz
@pytest.mark.parametrize("batch", range(100))
def test_exact_solvers_agree_at_length(batch: int, pool: SolverPool) -> None:
    for seed in range(100_000 + 1000 * batch, 100_000 + 1000 * (batch + 1)):
        known = Truth.of(random_problem(seed))
        for name in ("highs", "cpsat"):
            known.judge_exact(solve(known.problem, name, OPTIONS, pool=pool))
