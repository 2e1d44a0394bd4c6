"""A synchronized H3T step as a canonical problem: a chain, without any discretisation.

A layer is a node with 64 strategies, its sets of switches. Times are segments in the order in which they run. What
segments cost and use depends on one layer and a neighbour, so it is a factor between the two; the window of three
layers of the paper's simulator is the sum of two pairs, as a layer's forward segment looks only at the layer above and
its backward segment only at the layer below, and the limit holds at both.
"""

from __future__ import annotations

import numpy as np

from formulations.h3t.segments import SYNCHRONIZED_SETS, SegmentTables, handed_over, lazy
from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm

__all__ = ["h3t_problem"]

_TIME, _PEAK = 0, 1
_MEMORY = 0


def h3t_problem(tables: SegmentTables, memory_limit: int, seconds_per_cost: float | None = None) -> StrategyProblem:
    """Build the canonical problem.

    Parameters
    ----------
    tables
        Of the step.
    memory_limit
        Bytes on one device.
    seconds_per_cost
        Length of a quantum, or None.

    Returns
    -------
    StrategyProblem
        Node ``i`` is layer ``i + 1``, its strategies are sets of switches 0 .. 63, with synchronization besides.
    """
    count = tables.layers
    names = [*(f"forward {i}" for i in range(count + 1)), *(f"backward {i}" for i in reversed(range(count + 2)))]
    return StrategyProblem(
        name=f"h3t step of {count} layers",
        nodes=tuple(_node(tables, i) for i in range(1, count + 1)),
        factors=tuple(_factor(tables, i) for i in range(1, count)),
        resources=(Resource("memory", memory_limit),),
        horizon=2 * count + 3,
        seconds_per_cost=seconds_per_cost,
        time_names=tuple(names),
    )


def _node(tables: SegmentTables, layer: int) -> Node:
    """What depends on the switches of one layer alone."""
    count, sets = tables.layers, np.arange(SYNCHRONIZED_SETS)
    cost, always = tables.reload[layer - 1].copy(), tables.resident[layer - 1].copy()
    horizon = 2 * count + 3
    usage = [UsageTerm(_MEMORY, layer + 1, horizon - 1 - layer, tables.kept[layer - 1])]
    if layer == 1:
        cost += tables.fixed_cost
        always += tables.fixed_bytes
        for time, segment in (
            (0, tables.forward[:, 0, 0, lazy(sets)]),
            (horizon - 2, tables.backward[:, 1, :, 0]),
            (horizon - 1, np.repeat(tables.backward[:, 0, 0, :1], SYNCHRONIZED_SETS, axis=1)),
        ):
            cost += segment[_TIME]
            usage.append(_at(time, segment[_PEAK]))
    if layer == count:
        for time, segment in (
            (count, tables.forward[:, count, :, 0]),
            (count + 1, tables.backward[:, count + 1, 0, handed_over(sets)]),
        ):
            cost += segment[_TIME]
            usage.append(_at(time, segment[_PEAK]))
    usage.append(UsageTerm(_MEMORY, 0, horizon, always))
    return Node(f"layer {layer}", cost, None, tuple(usage))


def _factor(tables: SegmentTables, layer: int) -> Factor:
    """The forward segment of a layer and the backward segment of the one above."""
    sets = np.arange(SYNCHRONIZED_SETS)
    forward = tables.forward[:, layer][:, :, lazy(sets)]
    backward = tables.backward[:, layer + 1][:, :, handed_over(sets)].swapaxes(1, 2)
    times = (layer, 2 * tables.layers + 2 - (layer + 1))
    usage = [_at(time, segment[_PEAK]) for time, segment in zip(times, (forward, backward), strict=True)]
    return Factor((layer - 1, layer), forward[_TIME] + backward[_TIME], None, tuple(usage))


def _at(time: int, amount: IntArray) -> UsageTerm:
    return UsageTerm(_MEMORY, time, time + 1, np.ascontiguousarray(amount))
