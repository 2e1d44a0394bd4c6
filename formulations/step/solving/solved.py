"""A solved step: the decision, and what is known of its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from formulations.problem.solution import KnownBound, SolveResult, Status, relative_gap
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import SolverContradiction
from formulations.step.training_step import StepDecision


@dataclass(frozen=True, slots=True, eq=False)
class SolvedStep:
    """A decision within the limit.

    Parameters
    ----------
    decision
        The decision.
    result
        The solver's checked result; objective, bound and gap are those of the executed decision.
    bounding_problem
        Builds the problem whose lower bounds hold for every plan of the formulation that costs at most as much.
    """

    decision: StepDecision
    result: SolveResult
    bounding_problem: Callable[[], StrategyProblem]


def certified(result: SolveResult, known: KnownBound | None, cost: int) -> SolveResult:
    """A result with the cost of its executed decision and a bound for it with its proof.

    Raises
    ------
    SolverContradiction
        If the bound is above the cost.
    """
    bound = None if known is None else known.value
    if bound is not None and bound > cost:
        raise SolverContradiction(f"{result.solver} proves a bound of {bound}, but a decision costs {cost}")
    status = Status.OPTIMAL if bound == cost else Status.FEASIBLE
    is_beyond = result.claimed is not None and status is Status.FEASIBLE and result.claimed <= cost
    return replace(
        result,
        objective=cost,
        bound=bound,
        gap=relative_gap(cost, bound),
        status=status,
        proof=None if known is None else known.proof,
        proved_by="" if known is None else known.by,
        claimed=result.claimed if is_beyond else None,
        claimed_by=result.claimed_by if is_beyond else "",
    )
