"""The installation compiles H3T's loops, on a step whose limit binds."""

from __future__ import annotations

from support.problems.compiled_loops import compiled_loops, is_cached

import formulations.h3t
from formulations.h3t.problem import simulate
from formulations.h3t.warm_up import warm_up_h3t, warm_up_step


def test_memory_binds() -> None:
    step = warm_up_step()
    assert simulate(step, [0, 0]).peak > step.memory_limit >= simulate(step, [127, 127]).peak


def test_every_compiled_loop_is_in_the_cache_afterwards() -> None:
    warm_up_h3t()
    loops = list(compiled_loops(formulations.h3t))
    assert len(loops) == 7
    assert [loop.py_func.__qualname__ for loop in loops if not is_cached(loop)] == []
