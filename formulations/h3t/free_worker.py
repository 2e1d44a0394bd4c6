"""The worker's side of :mod:`formulations.h3t.free`: the event model by CP-SAT, and the relaxed program by HiGHS.

CP-SAT needs a process of its own, as it brings a HiGHS. The canonical problem is empty; a sequence of switches leaves
as the choices of a claim.
"""

from __future__ import annotations

import time

from formulations.encodings.pyomo_program import Values
from formulations.h3t.event_model import solve_events
from formulations.h3t.problem import H3tStep, simulate
from formulations.h3t.program import FreeProgram
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.programs.branch_and_cut import solve_program
from formulations.solvers.programs.existence import find_solution
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

__all__ = ["bound", "confirm", "decide"]


def decide(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    *,
    step: H3tStep,
    start: tuple[int, ...] | None,
) -> Claim:
    """Look for the fastest sequence, by CP-SAT; where the claim's bound is its cost, it is proven."""
    del problem, report, incumbent
    found = solve_events(step, options.time_limit, options.seed, start)
    return Claim(found.sequence, None if found.infeasible else found.bound, found.infeasible, found.message)


def bound(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    *,
    step: H3tStep,
    cutoff: int,
) -> Claim:
    """Bound all sequences that fit by the relaxed program, by HiGHS; above `cutoff` where it says there are none below.

    Sequences of its solutions that fit are reported.
    """
    del problem
    started = time.monotonic()
    program = FreeProgram(step, cutoff)

    def look_at(values: Values) -> None:
        sequence = program.sequence(values)
        if simulate(step, sequence).peak <= step.memory_limit:
            incumbent(sequence)

    def report_bound(known: int) -> None:
        report(Progress(time.monotonic() - started, None, known + program.constant, "highs"))

    most = cutoff - program.constant
    outcome = solve_program(program.program(), started + options.time_limit, options.seed, look_at, report_bound, most)
    if outcome.values is not None:
        look_at(outcome.values)
    best = None if outcome.bound is None else outcome.bound + program.constant
    return Claim(None, best, message=outcome.message)


def confirm(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    *,
    step: H3tStep,
    cutoff: int,
) -> Claim:
    """Look for any solution of the relaxed program that costs at most `cutoff`, by CP-SAT."""
    del problem, report, incumbent
    program = FreeProgram(step, cutoff)
    found = find_solution(program.program(), options.time_limit, options.seed, cutoff - program.constant)
    return Claim(None, None, found.infeasible, found.message)
