"""Columns of repeated blocks on captured steps, against branch and cut (which need not end in its time)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.never_worse import Case, reference, session_of_case

from formulations.models.registry import sharding_problem, step_problem
from formulations.models.step_replay import replay_decision
from formulations.solution import SolveOptions
from formulations.solvers import SolverPool, solve


@pytest.fixture(scope="module")
def pool() -> Iterator[SolverPool]:
    with SolverPool() as shared:
        yield shared


@pytest.mark.parametrize("formulation", ["kiwi_reduced", pytest.param("sharding", marks=pytest.mark.fuzz)])
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
