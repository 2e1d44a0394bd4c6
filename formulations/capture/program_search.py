"""CAPTURE's least peak by branch and cut (HiGHS) or by constraint programming (CP-SAT), each in a worker process.

Both are there to be compared with the dynamic program of :mod:`formulations.capture.exact`, which is faster
by orders of magnitude. They find a plan of least peak; the rule for ties is not part of their program.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from formulations.capture.problem import CapturePlan, PartitionProblem, PlannedStage
from formulations.capture.program import RankedPartition
from formulations.problem.solution import SolveOptions, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.processes.worker import Listener, SolverPool
from formulations.solvers.protocol.registry import SolverSpec
from formulations.solvers.running.ledger import SolverContradiction

__all__ = ["ProgramPlan", "ProgramSolver", "solve_as_program"]


class ProgramSolver(StrEnum):
    """What solves the program."""

    HIGHS = "highs"
    CPSAT = "cpsat"


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """What a solver found.

    Parameters
    ----------
    plan
        The plan of least peak that was found, or None.
    peak, bound
        Bytes of its fullest GPU, and what the solver claims that no plan falls below; None where nothing is known.
    status
        Feasible where there is a plan, since one solver proves nothing; infeasible is unconfirmed.
    message
        The solver's word.
    """

    plan: CapturePlan | None
    peak: int | None
    bound: int | None
    status: Status
    message: str


def solve_as_program(
    problem: PartitionProblem,
    solver: ProgramSolver,
    options: SolveOptions | None = None,
    pool: SolverPool | None = None,
) -> ProgramPlan:
    """Find the least peak by a solver of integer programs.

    Parameters
    ----------
    problem
        Stages and GPUs.
    solver
        Which.
    options
        Time limit and seed.
    pool
        Whose workers run it; one of its own if None.

    Raises
    ------
    SolverContradiction
        What the solver found is no plan, or lies below the solver's bound.
    WorkerStartError
        No process can be started.
    """
    ranked = RankedPartition.of(problem)
    spec = SolverSpec(
        f"capture ({solver})",
        f"formulations.capture.program_worker:solve_{solver}",
        {"partition": ranked.to_json()},
    )
    found: list[tuple[int, ...]] = []
    listener = Listener(on_incumbents=found.extend)
    workers = SolverPool() if pool is None else pool
    try:
        outcome = workers.run(spec, StrategyProblem("capture", (), (), (), 0), options or SolveOptions(), listener)
    finally:
        if pool is None:
            workers.close()
    claim = outcome.claim
    if claim is not None and claim.choices is not None:
        found.append(claim.choices)
    plans = [_plan(problem, stages, solver) for stages in found]
    plan = min(plans, key=problem.peak, default=None)
    if plan is None:
        infeasible = claim is not None and claim.proved_infeasible
        status = Status.INFEASIBLE_UNCONFIRMED if infeasible else Status.NO_SOLUTION
        return ProgramPlan(None, None, None, status, outcome.message)
    peak = problem.peak(plan)
    bound = None if claim is None or claim.bound is None else _bytes_of_rank(problem, claim.bound, peak)
    return ProgramPlan(plan, peak, bound, Status.FEASIBLE, outcome.message)


def _plan(problem: PartitionProblem, stages: tuple[int, ...], solver: ProgramSolver) -> CapturePlan:
    plan = tuple(PlannedStage(*stages[at : at + 2]) for at in range(0, len(stages), 2))
    if not problem.is_plan(plan):
        raise SolverContradiction(f"{solver}: the stages {stages} are no plan of CAPTURE's problem")
    return plan


def _bytes_of_rank(problem: PartitionProblem, rank: int, peak: int) -> int:
    """Bytes of a rank that no plan falls below, of which one peaks at `peak`."""
    allowed = np.broadcast_to(problem.allowed, problem.peaks.shape)
    ranked = np.unique(problem.peaks[allowed])
    if rank >= len(ranked) or ranked[rank] > peak:
        raise SolverContradiction(f"a plan of CAPTURE's peaks at {peak}, but rank {rank} of {len(ranked)} is its bound")
    return int(ranked[rank])
