"""Why there is no plan: by how much, at which moment, because of which tensors, and what would fit."""

from __future__ import annotations

from formulations.problem import StrategyProblem
from formulations.solution import SolveResult
from formulations.solvers import SolverPool


class InfeasibleError(ValueError):
    """No plan fits the memory, or none was found in time; one line that names the limit that would."""


def refusal(problem: StrategyProblem, result: SolveResult, pool: SolverPool, reserve: int) -> InfeasibleError:
    return InfeasibleError(f"{result.status}: {result.message}")
