"""The worker's side of :mod:`formulations.capture.program_search`: HiGHS or CP-SAT on the ranked program.

The problem arrives as text beside an empty canonical problem; a plan leaves as the choices of a claim, end and
configuration of every stage one after the other, and its rank as the bound.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from formulations.capture.program import PlacementProgram, RankedPartition
from formulations.problem.solution import Claim, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.programs.branch_and_cut import solve_program
from formulations.solvers.programs.existence import Existence, find_solution
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress


def solve_highs(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    *,
    partition: str,
) -> Claim:
    """Minimise the highest rank by branch and cut; ``problem`` is empty, ``partition`` says what is solved."""
    ranked = RankedPartition.from_json(partition)
    if not ranked.arcs():
        return Claim(None, None, proved_infeasible=True)
    placement = PlacementProgram(ranked)
    program = placement.program()

    def keep(values: NDArray[np.float64]) -> None:
        if not program.broken_rows(values):
            incumbent(placement.stages(values))

    deadline = time.monotonic() + options.time_limit
    outcome = solve_program(program, deadline, options.seed, keep, lambda _: None)
    if outcome.infeasible:
        return Claim(None, None, proved_infeasible=True, message=outcome.message)
    whole = outcome.values is not None and not program.broken_rows(outcome.values)
    choices = placement.stages(outcome.values) if whole and outcome.values is not None else None
    return Claim(choices, outcome.bound, message=outcome.message)


def solve_cpsat(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    *,
    partition: str,
) -> Claim:
    """Bisect the ranks with CP-SAT: each time, is there a plan without stages of higher rank; arguments as above."""
    ranked = RankedPartition.from_json(partition)
    deadline = time.monotonic() + options.time_limit
    low, high = 0, int(ranked.ranks.max(initial=0))
    best: tuple[int, ...] | None = None
    while low <= high:
        middle = (low + high) // 2 if best is not None else high
        if not ranked.arcs(middle):
            found = Existence(None, True, "no plan can begin")
        else:
            placement = PlacementProgram(ranked, middle)
            found = find_solution(placement.program(), deadline - time.monotonic(), options.seed)
        if found.values is not None:
            best = placement.stages(found.values)
            incumbent(best)
            high = ranked.rank(best) - 1
        elif found.infeasible and best is None:
            return Claim(None, None, proved_infeasible=True, message=found.message)
        elif found.infeasible:
            low = middle + 1
        else:
            break
    return Claim(best, low, message=f"ranks below {low} are proven impossible")
