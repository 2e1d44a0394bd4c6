from __future__ import annotations

from support.problems.compiled_loops import compiled_loops, is_cached

import formulations.galvatron
from formulations.galvatron.dynamic_program import search_stage
from formulations.galvatron.warm_up import _tables, warm_up_galvatron


def test_memory_binds() -> None:
    tables = _tables()
    assert search_stage(tables.stage(0, 3, 2, 14), 1).cost > search_stage(tables.stage(0, 3, 2, 100), 1).cost


def test_every_compiled_loop_of_the_searches_is_reached() -> None:
    warm_up_galvatron()
    loops = list(compiled_loops(formulations.galvatron))
    assert [loop.py_func.__qualname__ for loop in loops if not loop.signatures or not is_cached(loop)] == []
    assert len(loops) == 10
