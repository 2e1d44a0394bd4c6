"""Columns of repeated blocks on traced steps, against branch and cut (which need not end in its time).

With offload and one layout an operator they are what solves a step whose blocks repeat.
"""

from __future__ import annotations

import pytest
from support.steps.never_worse import Case, reference, session_of_case
from support.tiers import slow

from formulations.problem.solution import SolveOptions
from formulations.solvers import DEFAULT_SOLVER, SolverPool, solve
from formulations.solvers.running.lanes import BLOCKS
from formulations.step.replay import replay_decision
from formulations.step.solving.registry import sharding_problem, step_problem
from formulations.step.solving.stages import use_block_columns
from planner.session import PlanningSession, PlanRequest


@pytest.mark.parametrize("formulation", [slow("kiwi_reduced"), pytest.param("sharding", marks=pytest.mark.fuzz)])
def test_within_half_a_per_cent_of_the_optimum(formulation: str, pool: SolverPool) -> None:
    case = Case("llama", 4, 8, 64, "a100-8-nvlink", (2,), 0.5)
    model = session_of_case(reference(case), case.cluster, case.mesh).space.model
    free = sharding_problem(model, None)
    cheapest = solve(free.problem, "tree_dp", SolveOptions(time_limit=20.0), None, pool)
    assert cheapest.choices is not None
    peak = replay_decision(model, free.decode(cheapest.choices)).peak
    problem = step_problem(formulation, model, peak * 9 // 10).problem
    best = solve(problem, "highs", SolveOptions(time_limit=8.0), None, pool)
    assert best.objective is not None
    assert best.bound is not None
    found = solve(problem, "blocks", SolveOptions(time_limit=20.0, iteration_limit=30), None, pool)
    assert found.objective is not None
    assert found.bound is not None
    assert found.bound <= best.objective
    assert best.bound <= found.objective <= 1.005 * best.objective
    assert found.bound >= 0.995 * best.bound


def llama(mesh: tuple[int, ...], layers: int = 4) -> PlanningSession:
    case = Case("llama", layers, 8, 64, "a100-8-nvlink", mesh, 0.5)
    return session_of_case(reference(case), case.cluster, case.mesh)


def test_they_solve_offload_where_blocks_repeat_and_operators_have_one_layout() -> None:
    one = llama((1,))
    offload = one.problem(PlanRequest(formulation="kiwi_offload"))
    assert use_block_columns(offload, DEFAULT_SOLVER)
    assert not use_block_columns(offload, "highs")
    assert not use_block_columns(one.problem(PlanRequest(formulation="kiwi_chain")), DEFAULT_SOLVER)
    assert not use_block_columns(llama((2,)).problem(PlanRequest(formulation="kiwi_offload")), DEFAULT_SOLVER)
    assert not use_block_columns(llama((1,), layers=1).problem(PlanRequest(formulation="kiwi_offload")), DEFAULT_SOLVER)


@pytest.mark.slow
def test_what_they_find_with_offload_is_no_dearer_than_without(pool: SolverPool) -> None:
    session = llama((1,))
    free = session.solve(PlanRequest(time_limit=10.0), pool=pool)
    peak = session.execute(free.decision).peak
    memory = peak * 9 // 10 + session.costs.device.reserve_bytes
    chain = session.solve(PlanRequest(memory, time_limit=5.0), pool=pool).result
    offload = session.solve(PlanRequest(memory, "kiwi_offload", time_limit=5.0), pool=pool)
    assert offload.result.solver == BLOCKS
    assert offload.result.objective is not None
    assert chain.objective is not None
    assert offload.result.bound is not None
    assert offload.result.bound <= offload.result.objective <= chain.objective
    assert session.execute(offload.decision, memory - session.costs.device.reserve_bytes).peak <= peak * 9 // 10
