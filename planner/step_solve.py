"""Solving the problem of a step, with memory that is known after the decision is executed.

A formulation's problem may count a little less than what its decision really holds, where that depends on three
decisions at once and the tables would be too large. So every decision is executed on the step's tables; where it
holds more than the limit, the problem that counts a little more is solved as well. The bound stays that of the
first problem, which counted too little and is therefore valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from formulations.models.registry import StepProblem
from formulations.models.sharding import MEMORY
from formulations.models.step import StepDecision, StepModel
from formulations.models.step_replay import StepReplay, replay_decision
from formulations.problem import StrategyProblem
from formulations.solution import Progress, SolveOptions, SolveResult, Status, relative_gap
from formulations.solvers import SolverContradiction, SolverPool, solve
from formulations.solvers.minimum_peak import MinimumPeak, minimum_peak

PEAK_SECONDS = 30.0
"""Longest search for the smallest peak, where a solver found no plan."""


@dataclass(frozen=True, slots=True, eq=False)
class SolvedStep:
    """A decision within the limit.

    Parameters
    ----------
    decision, executed
        What was decided, and its cost and memory.
    result
        The solver's checked result; objective, bound and gap are those of the decision.
    problem
        What was solved, under the limit that was asked for.
    """

    decision: StepDecision
    executed: StepReplay
    result: SolveResult
    problem: StrategyProblem


def solve_step(
    model: StepModel,
    built: StepProblem,
    solver: str,
    options: SolveOptions,
    progress: Callable[[Progress], None] | None = None,
    pool: SolverPool | None = None,
) -> SolvedStep | MinimumPeak:
    """Find a decision within the limit; where none was found, the smallest peak says why.

    Parameters
    ----------
    model
        The step's tables.
    built
        Its problem under the limit.
    solver, options
        How to solve it; every round has the time limit of its own.
    progress
        Called with every better incumbent or bound.
    pool
        Warm workers, or None.
    """
    limit = built.problem.resources[MEMORY].limit
    first = _solve(built.problem, solver, options, progress, pool)
    if isinstance(first, MinimumPeak):
        return first
    assert first.choices is not None
    decision = built.decode(first.choices)
    executed = replay_decision(model, decision)
    if limit is None or executed.peak <= limit:
        return SolvedStep(decision, executed, _certified(first, first.bound, executed.cost), built.problem)
    assert built.safer is not None, "a problem that counts everything is never over the limit"
    safer = built.safer()
    second = _solve(safer.problem, solver, options, progress, pool)
    if isinstance(second, MinimumPeak):
        return second
    assert second.choices is not None
    decision = safer.decode(second.choices)
    executed = replay_decision(model, decision)
    assert executed.peak <= limit
    return SolvedStep(decision, executed, _certified(second, first.bound, executed.cost), built.problem)


def _solve(
    problem: StrategyProblem,
    solver: str,
    options: SolveOptions,
    progress: Callable[[Progress], None] | None,
    pool: SolverPool | None,
) -> SolveResult | MinimumPeak:
    """Solve; where nothing was found, minimise the peak and start again from that assignment."""
    result = solve(problem, solver, options, progress, pool)
    if result.choices is not None:
        return result
    seconds = min(PEAK_SECONDS, 3 * options.time_limit)
    smallest = minimum_peak(problem, MEMORY, replace(options, time_limit=seconds), pool)
    limit = problem.resources[MEMORY].limit
    assert limit is not None, "without a limit every layout fits"
    if smallest.peak is None or smallest.peak > limit:
        return smallest
    return solve(problem, solver, replace(options, initial_choices=smallest.choices), progress, pool)


def _certified(result: SolveResult, bound: int | None, cost: int) -> SolveResult:
    """A result with the cost of its decision and the bound of the first problem."""
    assert result.objective is not None
    assert cost <= result.objective, "a decision never costs more than its choices"
    if bound is not None and bound > cost:
        raise SolverContradiction(f"{result.solver} claims a bound of {bound}, but a decision costs {cost}")
    status = Status.OPTIMAL if bound == cost else Status.FEASIBLE
    return replace(result, objective=cost, bound=bound, gap=relative_gap(cost, bound), status=status)
