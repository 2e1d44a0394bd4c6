"""Compiles the loops of the H3T simulator and searches; :mod:`formulations.warm_up` calls it at installation."""

from __future__ import annotations

from formulations.h3t.dynamic_program import search_dp
from formulations.h3t.exact import solve_synchronized
from formulations.h3t.problem import H3tBorders, H3tLayer, H3tStep
from formulations.h3t.sampling import search_uniform
from formulations.h3t.segments import segment_tables

__all__ = ["warm_up_h3t"]

UNITS = 8


def warm_up_h3t() -> None:
    """Search a step of two layers in every way."""
    step = warm_up_step()
    tables = segment_tables(step)
    search_uniform(step)
    search_dp(tables, step.memory_limit, units=UNITS)
    solve_synchronized(tables, step.memory_limit)


def warm_up_step() -> H3tStep:
    """Two layers that do not fit with all switches off."""
    layer = H3tLayer(
        parameter_bytes=4,
        shard_bytes=2,
        hidden_bytes=3,
        activation_bytes=9,
        forward=4,
        backward=8,
        gather=3,
        scatter=3,
        hidden_copy=2,
        shard_copy=1,
        update=1,
    )
    return H3tStep(layers=(layer, layer), borders=H3tBorders(), device_link=True, memory_limit=35)
