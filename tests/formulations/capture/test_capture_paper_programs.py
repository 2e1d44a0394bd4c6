"""CAPTURE's problem as an integer program by HiGHS and CP-SAT, beside the dynamic program."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems.capture_problems import random_partition

from formulations.capture.exact import least_peak_plan
from formulations.capture.problem import TraceError
from formulations.capture.program import RankedPartition
from formulations.capture.program_search import ProgramSolver, solve_as_program
from formulations.problem.solution import SolveOptions, Status
from formulations.solvers import SolverPool


@pytest.mark.parametrize("solver", ProgramSolver)
@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 540), marks=pytest.mark.fuzz)], ids=["few", "more"]
)
def test_both_solvers_find_and_prove_the_least_peak(seeds: range, solver: ProgramSolver, pool: SolverPool) -> None:
    proven = 0
    for seed in seeds:
        problem = random_partition(seed)
        if problem is None:
            continue
        found = solve_as_program(problem, solver, SolveOptions(time_limit=20.0), pool)
        try:
            least = problem.peak(least_peak_plan(problem))
        except TraceError:
            assert found.status is Status.INFEASIBLE_UNCONFIRMED, seed
            continue
        assert (found.status, found.bound) == (Status.FEASIBLE, found.peak), (seed, found.message)
        assert problem.is_plan(found.plan)
        assert problem.peak(found.plan) == found.peak == found.bound == least, seed
        proven += 1
    assert proven > 0.4 * len(seeds)


@pytest.mark.parametrize("solver", ProgramSolver)
def test_where_no_plan_is_possible_both_say_so(solver: ProgramSolver, pool: SolverPool) -> None:
    problem = next(filter(None, map(random_partition, range(9))))
    problem.allowed[:, 0] = False
    found = solve_as_program(problem, solver, SolveOptions(time_limit=20.0), pool)
    assert (found.status, found.plan, found.bound) == (Status.INFEASIBLE_UNCONFIRMED, None, None)


def test_ranks_order_as_bytes_do_and_travel_as_text() -> None:
    problem = random_partition(0)
    ranked = RankedPartition.of(problem)
    allowed = np.broadcast_to(problem.allowed, problem.peaks.shape)
    order = np.argsort(problem.peaks[allowed], kind="stable")
    assert (np.diff(ranked.ranks[allowed][order]) >= 0).all()
    assert (ranked.ranks[~allowed] == -1).all()
    again = RankedPartition.from_json(ranked.to_json())
    assert all((getattr(again, name) == getattr(ranked, name)).all() for name in ("degrees", "room", "ranks"))
