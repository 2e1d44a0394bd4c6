"""The installation compiles every loop of the package, on problems whose limits bind."""

from __future__ import annotations

import pytest
from support.problems.compiled_loops import compiled_loops, is_cached

import formulations
from formulations import warm_up
from formulations.galvatron.dynamic_program import search_stage
from formulations.galvatron.warm_up import _tables
from formulations.h3t.problem import simulate
from formulations.h3t.warm_up import warm_up_step
from formulations.problem.checker import check
from formulations.solvers import solve_in_process


@pytest.mark.parametrize("limit_bytes", warm_up.LIMITS_BYTES)
def test_the_limit_binds_and_can_be_met(limit_bytes: int) -> None:
    problem = warm_up.warm_up_problem(limit_bytes)
    problem.validate()
    result = solve_in_process(problem, "lagrangian", warm_up.OPTIONS)
    assert result.choices is not None
    assert check(problem, result.choices).ok
    cheapest = tuple(int(node.cost.argmin()) for node in problem.nodes)
    assert not check(problem, cheapest).ok


def test_memory_binds_in_the_problems_of_the_papers() -> None:
    tables, step = _tables(), warm_up_step()
    assert search_stage(tables.stage(0, 3, 2, 14), 1).cost > search_stage(tables.stage(0, 3, 2, 100), 1).cost
    assert simulate(step, [0, 0]).peak > step.memory_limit >= simulate(step, [127, 127]).peak


def test_every_compiled_loop_is_in_the_cache_afterwards() -> None:
    warm_up.main()
    loops = list(compiled_loops(formulations))
    assert len(loops) > 90
    assert [f"{x.py_func.__module__}.{x.py_func.__qualname__}" for x in loops if not is_cached(x)] == []
