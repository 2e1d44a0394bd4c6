"""What any solver may say about a small problem: enumeration knows the optimum, and the solver is judged by it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.problems.delicate_problems import delicate_problem
from support.problems.problem_files import write_problem
from support.problems.random_problems import random_problem
from support.problems.shrinking import shrunk
from support.problems.tight_problems import tight_problem

from formulations.problem.checker import check_result
from formulations.problem.solution import SolveOptions, SolveResult, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import SOLVERS, SolverPool, find_solver, solve, solve_in_process
from formulations.solvers.processes.worker import Ending

TRUTH = "brute_force"
EXACT = ("highs", "cpsat", "pyomo", "portfolio")
"""Solvers that prove the optimum of every small problem; all others owe no more than true bounds and costs."""

HEURISTICS = tuple(sorted(set(SOLVERS) - {TRUTH, *EXACT}))
"""Everything else that is registered, so that a new solver is among them at once."""

EXACT_UP_TO = 10**12
"""Sum of all costs up to which doubles let every exact solver prove the optimum to the last unit."""

LOOSE_GAP = 1e-9
ITERATIONS = 8
"""Of a heuristic: enough to close most gaps, few enough that some problems are left open."""

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "problems"
"""Small problems that some solver once got wrong."""

_BROKEN = (Ending.FAILED, Ending.CRASHED, Ending.TIME_LIMIT, Ending.MEMORY_LIMIT)
_ENDED_BADLY = re.compile(rf"\b({'|'.join(_BROKEN)}): |does not hold")


def fuzz_problem(seed: int) -> StrategyProblem:
    """A problem of every kind: with all that the format allows, tight in memory, or delicate in its numbers."""
    if seed % 6 == 1:
        return delicate_problem(seed)
    return tight_problem(seed) if seed % 3 else random_problem(seed)


def options_for(solver: str, seed: int = 0) -> SolveOptions:
    """Time enough, and for heuristics few iterations; the portfolio works alone on three problems of four."""
    return SolveOptions(
        time_limit=60,
        iteration_limit=None if solver in EXACT else ITERATIONS,
        workers=1 if seed % 4 else 2,
    )


def run_solver(solver: str, problem: StrategyProblem, seed: int, pool: SolverPool) -> SolveResult:
    """In this process where the solver allows that: it is faster, and exceptions show where they come from."""
    spec = find_solver(solver)
    if spec.needs_own_process or spec.is_coordinator:
        return solve(problem, solver, options_for(solver, seed), pool=pool)
    return solve_in_process(problem, solver, options_for(solver, seed))


@dataclass(frozen=True)
class Truth:
    """A problem and its optimum by brute force, None where nothing is feasible."""

    problem: StrategyProblem
    optimum: int | None

    @classmethod
    def of(cls, problem: StrategyProblem) -> Truth:
        """Enumerate all assignments."""
        return cls(problem, solve_in_process(problem, TRUTH, SolveOptions()).objective)

    def judge_solver(self, solver: str, seed: int, pool: SolverPool) -> None:
        """Run a registered solver and judge it by what it owes."""
        result = run_solver(solver, self.problem, seed, pool)
        (self.judge_exact if solver in EXACT else self.judge)(result)

    def judge_exact(self, result: SolveResult) -> None:
        """An exact solver with time enough proves the optimum, or infeasibility with a witness."""
        where = self._where(result)
        self.judge(result)
        if self.optimum is None:
            assert result.status is Status.INFEASIBLE, where
            return
        assert result.objective is not None, where
        assert result.bound is not None, where
        total = total_cost(self.problem)
        if total <= EXACT_UP_TO:
            assert result.status is Status.OPTIMAL, where
            assert result.objective == self.optimum, where
        assert result.objective - result.bound <= LOOSE_GAP * total, where

    def judge(self, result: SolveResult) -> None:
        """Whatever a solver says must be true: bound <= optimum <= cost, and infeasible only where it is."""
        assert not _ENDED_BADLY.search(result.message), self._where(result)
        assert self.optimum is None or result.status is not Status.INFEASIBLE_UNCONFIRMED, self._where(result)
        self.judge_truth(result)

    def judge_truth(self, result: SolveResult) -> None:
        """As :meth:`judge`, whatever became of the solver on the way, and whatever is only claimed."""
        where = self._where(result)
        assert check_result(self.problem, result).ok, where
        if self.optimum is None:
            assert result.choices is None, where
            return
        assert result.status is not Status.INFEASIBLE, where
        assert result.bound is None or result.bound <= self.optimum, where
        assert result.objective is None or result.objective >= self.optimum, where
        assert result.status is not Status.OPTIMAL or result.objective == self.optimum, where

    def _where(self, result: SolveResult) -> str:
        return f"{self.problem.name}, optimum {self.optimum}: {result}"


def total_cost(problem: StrategyProblem) -> int:
    """Sum over all tables of the largest absolute cost."""
    tables = [table.cost for table in (*problem.nodes, *problem.factors)]
    return sum(max(abs(int(table.max())), abs(int(table.min()))) for table in tables)


def judge_or_keep(problem: StrategyProblem, who: str, judge: Callable[[StrategyProblem], None]) -> None:
    """Judge a problem; where that fails, shrink it, write what is left beside the other fixtures, and fail.

    Parameters
    ----------
    problem
        What to judge.
    who
        Who is judged, for the fixture's name.
    judge
        Raises where something is wrong.
    """
    try:
        judge(problem)
    except Exception as error:  # whatever a solver raises is what is looked for
        kept, signature = FIXTURES / f"{problem.name}-{who}.json", _signature(error)
        write_problem(kept, shrunk(problem, lambda smaller: _failure(smaller, judge) == signature))
        error.add_note(f"{who} is wrong about {problem.name}; the least problem of that kind is in {kept}")
        raise


def _failure(problem: StrategyProblem, judge: Callable[[StrategyProblem], None]) -> tuple[type[Exception], int] | None:
    try:
        judge(problem)
    except Exception as error:
        return _signature(error)
    return None


def _signature(error: Exception) -> tuple[type[Exception], int]:
    """Type and line of a failure, so that shrinking does not wander off to another one."""
    return type(error), traceback.extract_tb(error.__traceback__)[-1].lineno or 0
