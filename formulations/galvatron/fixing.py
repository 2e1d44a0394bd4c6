"""Strategies of a Galvatron-BMW stage that can be part of a feasible plan: fixing by least memory and time.

A layer alone can be too large: with many samples on a device, the backward memory of one checkpointed layer exceeds
the limit, though a mean over strategies, on which prices act, would keep it. So for every strategy the least memory of
the other layers is added up at every backward step, and the least time; strategies above a limit are dropped,
repeatedly until no strategy is.
"""

from __future__ import annotations

import numpy as np

from formulations.galvatron.stage import StageProblem
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = ["possible_strategies"]


def possible_strategies(stage: StageProblem, repeated_limit: int | None = None) -> BoolArray:
    """Find the strategies that fit beside the least of all other layers.

    Parameters
    ----------
    stage
        Layers and strategies.
    repeated_limit
        Quanta that a micro-batch without synchronisation may take, or None.

    Returns
    -------
    BoolArray
        Shape ``(L, S)``. Where a layer has none, there is no plan, which is proven.
    """
    allowed = stage.allowed
    while allowed.any(axis=1).all():
        kept = allowed & (_least_peak(stage, allowed) <= stage.memory_limit)
        if repeated_limit is not None:
            kept &= _beside_others(stage.repeated, allowed) <= repeated_limit
        if (kept == allowed).all():
            break
        allowed = kept
    return allowed


def _least_peak(stage: StageProblem, allowed: BoolArray) -> IntArray:
    """Bytes that a plan with this strategy of this layer has at least, shape ``(L, S)``."""
    held = stage.states + stage.forward
    states_behind = _behind(_least(stage.states, allowed))
    held_before = _before(_least(held, allowed))
    own = held_before[:, None] + held + stage.backward + states_behind[:, None]
    # Of every backward step the bytes in use at least, and the most of them before and behind each layer.
    steps = _least(own, allowed)
    no_step = np.zeros(1, dtype=np.int64)
    later = np.concatenate([np.maximum.accumulate(steps[::-1])[::-1][1:], no_step])
    earlier = np.concatenate([no_step, np.maximum.accumulate(steps)[:-1]])
    at_later = later[:, None] + held - _least(held, allowed)[:, None]
    at_earlier = earlier[:, None] + stage.states - _least(stage.states, allowed)[:, None]
    peak: IntArray = np.maximum(own, np.maximum(at_later, at_earlier))
    return peak


def _beside_others(table: IntArray, allowed: BoolArray) -> IntArray:
    """Sum of a table with this strategy of this layer and the least of all others, shape ``(L, S)``."""
    least = _least(table, allowed)
    total: IntArray = least.sum() + table - least[:, None]
    return total


def _least(table: IntArray, allowed: BoolArray) -> IntArray:
    least: IntArray = table.min(axis=1, where=allowed, initial=np.iinfo(np.int64).max)
    return least


def _before(least: IntArray) -> IntArray:
    """Sum over the layers before each one."""
    sums: IntArray = least.cumsum() - least
    return sums


def _behind(least: IntArray) -> IntArray:
    """Sum over the layers behind each one."""
    return _before(least[::-1])[::-1]
