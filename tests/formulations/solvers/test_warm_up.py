from __future__ import annotations

import pytest
from support.problems.compiled_loops import compiled_loops, is_cached

import formulations
from formulations import warm_up
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


def test_every_compiled_loop_is_in_the_cache_afterwards() -> None:
    warm_up.main()
    loops = list(compiled_loops(formulations))
    assert len(loops) > 90
    assert [f"{x.py_func.__module__}.{x.py_func.__qualname__}" for x in loops if not is_cached(x)] == []
