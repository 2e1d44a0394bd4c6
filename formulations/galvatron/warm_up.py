"""Compiles the loops of the Galvatron-BMW searches; :mod:`formulations.warm_up` calls it at installation."""

from __future__ import annotations

import numpy as np

from formulations.galvatron.costs import LayerTables
from formulations.galvatron.dynamic_program import search_stage
from formulations.galvatron.labels import solve_stage
from formulations.galvatron.slips import Slip
from formulations.galvatron.windows import window_bounds

__all__ = ["warm_up_galvatron"]


def warm_up_galvatron() -> None:
    """Search a small stage in every way."""
    tables = _tables()
    stage = tables.stage(0, len(tables.kinds), 2, 14)
    search_stage(stage, 1)
    search_stage(stage, 1, Slip.EQ4_STATE)
    solve_stage(stage)
    solve_stage(stage, repeated_limit=8)
    window_bounds(tables, 2, 14)


def _tables() -> LayerTables:
    """Three layers whose fast strategy needs more memory than there is for all."""
    slow_and_fast = np.array([[4, 1]])
    none = np.zeros((1, 2), dtype=np.int64)
    return LayerTables(
        strategies=(),
        kinds=np.zeros(3, dtype=np.int64),
        synchronised=slow_and_fast + 1,
        repeated=slow_and_fast,
        forward=np.array([[1, 3]]),
        backward=none,
        states=none,
        borrowed=none,
        allowed=np.ones((1, 2), dtype=np.bool_),
        layouts=np.arange(2),
        transformation=np.zeros((1, 2, 2), dtype=np.int64),
    )
