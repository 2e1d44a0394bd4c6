"""The exact plan of a synchronized H3T step, in bytes: the labels of a Galvatron-BMW stage, which have the same shape.

From the last layer to the first, the peak of layers ``i ..`` is the recursion of
:mod:`formulations.galvatron.labels` with resident shards as states, what a layer keeps as forward, and what
its two segments need beyond that as backward. Such a stage has strategies that depend on one layer, and costs between
the layouts of neighbours. So a strategy here is a set of switches together with what it assumes of its neighbours, its
layout says what it assumes and what it is, and layouts that contradict each other cost more than any plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from formulations.galvatron.labels import solve_stage
from formulations.galvatron.stage import StageProblem
from formulations.h3t.operations import Switch
from formulations.h3t.problem import H3tError, Outcome
from formulations.h3t.segments import HANDED_OVER_SETS, SYNCHRONIZED_SETS, SegmentTables, handed_over, lazy
from formulations.problem.strategy_problem import BoolArray, IntArray

_UNSEEN = Switch.REMAT | Switch.ECONOMICAL_FORWARD | Switch.ECONOMICAL_BACKWARD
_OTHERS = np.array([s for s in range(SYNCHRONIZED_SETS) if s & ~int(_UNSEEN) == 0])
"""Sets of the switches that no neighbour sees."""

__all__ = ["ExactResult", "least_memory", "solve_synchronized"]


@dataclass(frozen=True, slots=True)
class ExactResult:
    """The best synchronized sequence and a bound on all of them.

    Parameters
    ----------
    sequence, outcome
        Sets of switches, their simulated cost and peak, or None where no plan was found.
    bound
        No synchronized sequence within the limit costs less; None where there is none at all, which is then proven.
    """

    sequence: tuple[int, ...] | None
    outcome: Outcome | None
    bound: int | None


def solve_synchronized(
    tables: SegmentTables, memory_limit: int, relative_gap: float = 0.0, deadline: float = inf
) -> ExactResult:
    """Find the fastest sequence within the limit.

    Parameters
    ----------
    tables
        Of the step.
    memory_limit
        Bytes on one device.
    relative_gap
        The plan may cost this much more than the bound, relative to its cost; 0 for the optimum.
    deadline
        When to end, by the monotonic clock, with what was found.
    """
    return _solve(_Strategies(tables), memory_limit, relative_gap, deadline, with_time=True)


def least_memory(tables: SegmentTables) -> int:
    """The smallest limit within which there is a synchronized sequence.

    Raises
    ------
    H3tError
        The search gave up at some limit, so that it is not known.
    """
    strategies = _Strategies(tables)
    low, high = tables.fixed_bytes, tables.outcome([SYNCHRONIZED_SETS - 1] * tables.layers).peak
    while low < high:
        middle = (low + high) // 2
        found = _solve(strategies, middle, 0.0, inf, with_time=False)
        if found.outcome is not None:
            high = found.outcome.peak
        elif found.bound is None:
            low = middle + 1
        else:
            raise H3tError(
                f"the least memory of {tables.layers} layers is not known: it is between {low} and {high} bytes, where "
                "there are too many plans to compare; use fewer unlike layers"
            )
    return high


def _solve(
    strategies: _Strategies, memory_limit: int, relative_gap: float, deadline: float, *, with_time: bool
) -> ExactResult:
    tables = strategies.tables
    if memory_limit < tables.fixed_bytes:
        return ExactResult(None, None, None)
    stage = strategies.stage(memory_limit - tables.fixed_bytes, with_time)
    found = solve_stage(stage, relative_gap=relative_gap, deadline=deadline)
    contradiction = strategies.contradiction(with_time)
    if found.bound is None or found.bound >= contradiction:
        return ExactResult(None, None, None)
    bound = found.bound + tables.fixed_cost
    if found.choices is None or found.cost is None or found.cost >= contradiction:
        return ExactResult(None, None, bound)
    sequence = tuple(int(strategies.sets[choice]) for choice in found.choices)
    with_sync = tuple(s | int(Switch.SEGMENT_SYNC) for s in sequence)
    return ExactResult(with_sync, tables.outcome(sequence), bound)


class _Strategies:
    """What a layer may be, its neighbours included, and the stage of all layers."""

    def __init__(self, tables: SegmentTables) -> None:
        self.tables = tables
        self._by_layer = tables.by_layer()
        below, own, above, rest = np.meshgrid(
            np.arange(HANDED_OVER_SETS), np.arange(HANDED_OVER_SETS), np.arange(2), _OTHERS, indexing="ij"
        )
        sets = own * int(Switch.OFFLOAD_HIDDEN) + rest
        needed = (_seen_from_above(below) == below) & self._undominated(below, sets, above)
        self._below, self.sets, self._above = (each[needed] for each in (below, sets, above))
        codes = np.stack([self._below, handed_over(self.sets), self._above])
        layouts, self._layouts = np.unique(codes, axis=1, return_inverse=True)
        self._contradicts = (_seen_from_above(layouts[1])[:, None] != layouts[0]) | (
            layouts[2][:, None] != lazy(layouts[1] * int(Switch.OFFLOAD_HIDDEN))
        )

    def _undominated(self, below: IntArray, sets: IntArray, above: IntArray) -> BoolArray:
        """Which sets none that differs only in what no neighbour sees beats or equals in everything at every layer.

        All arrays have this choice on the last axis.
        """
        layers = self._by_layer
        kept = np.broadcast_to(layers.kept[:, sets], (len(layers.kept), *sets.shape))
        numbers = np.stack([layers.time[:, below, sets, above], layers.peak[:, below, sets, above], kept])
        no_worse: BoolArray = np.asarray((numbers[..., :, None] <= numbers[..., None, :]).all(axis=(0, 1)))
        earlier = np.arange(len(_OTHERS))[:, None] < np.arange(len(_OTHERS))
        beaten = (no_worse & (~no_worse.swapaxes(-1, -2) | earlier)).any(axis=-2)
        return np.logical_not(beaten)

    def contradiction(self, with_time: bool) -> int:
        """What two layouts that contradict each other cost: more than any plan."""
        return 1 + (int(self._by_layer.time.max(axis=(1, 2, 3)).sum()) if with_time else 0)

    def stage(self, room: int, with_time: bool) -> StageProblem:
        """The stage under a limit; without time everything that fits costs nothing."""
        layers = self._by_layer
        time, peak = (each[:, self._below, self.sets, self._above] for each in (layers.time, layers.peak))
        kept, resident = layers.kept[:, self.sets], layers.resident[:, self.sets]
        nothing = np.zeros_like(time)
        transformation = self.contradiction(with_time) * self._contradicts.astype(np.int64)
        return StageProblem(
            cost=time if with_time else nothing,
            repeated=nothing,
            forward=kept,
            backward=peak - kept,
            states=resident,
            allowed=self._allowed(),
            layouts=self._layouts,
            transformation=np.repeat(transformation[None], len(time), axis=0),
            memory_limit=room,
        )

    def _allowed(self) -> BoolArray:
        """Below the first layer and above the last one there is nothing to assume."""
        allowed = np.ones((self.tables.layers, len(self.sets)), dtype=np.bool_)
        allowed[0] &= self._below == 0
        allowed[-1] &= self._above == 0
        return allowed


def _seen_from_above(below: IntArray) -> IntArray:
    """What the layer above sees of a layer: without partition it does not see lazy prefetching."""
    partition, is_lazy = (int(switch // Switch.OFFLOAD_HIDDEN) for switch in (Switch.PARTITION, Switch.LAZY_PREFETCH))
    return np.where(below & partition, below, below & ~is_lazy)
