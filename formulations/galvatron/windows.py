"""Lower bounds for every possible stage of a Galvatron-BMW pipeline at once.

A window is a run of layers that may become a stage. For a price per byte, one pass from every first layer bounds all
windows that begin there (:mod:`formulations.galvatron.prices` has the reasoning for one). The best memory prices of a
chain are slopes between its strategies, so these are the prices that are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from formulations.galvatron.costs import LayerTables
from formulations.galvatron.prices import price_shift
from formulations.galvatron.stage import StageProblem
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = ["IMPOSSIBLE", "WindowBounds", "window_bounds"]

IMPOSSIBLE = 2**60
"""Bound of a window without a plan; sums over stages of this stay within 64 bits."""

_MOST_PRICES = 10
_PART_BITS = 58


@dataclass(frozen=True, slots=True, eq=False)
class WindowBounds:
    """Bounds of all windows at one position of a pipeline.

    Parameters
    ----------
    costs, repeated
        The cost, and the time of a micro-batch without synchronisation, are at least this, shape ``(L + 1, L + 1)``,
        indexed by the first layer and the end.
    """

    costs: IntArray
    repeated: IntArray

    def at(self, repeated_limit: int | None) -> IntArray:
        """Bounds on the cost where the repeated time may be this much, shape ``(L + 1, L + 1)``."""
        if repeated_limit is None:
            return self.costs
        bounds: IntArray = np.where(self.repeated > repeated_limit, IMPOSSIBLE, self.costs)
        return bounds


def window_bounds(tables: LayerTables, in_flight: int, memory_limit: int) -> WindowBounds:
    """Bound every window at one position.

    Parameters
    ----------
    tables
        Costs of all layers.
    in_flight
        Micro-batches whose activations are held.
    memory_limit
        Bytes on one device.
    """
    layers = len(tables.kinds)
    costs, repeated = np.full((2, layers + 1, layers + 1), IMPOSSIBLE)
    borrowers = np.flatnonzero(tables.borrowed[tables.kinds].max(axis=1)).tolist()
    tied = [0, *borrowers] if borrowers else []
    # All windows that begin behind one tied layer, and at the next one at the latest, borrow alike.
    for first, behind in pairwise(sorted({0, *(layer + 1 for layer in tied), layers})):
        whole = tables.stage(first, layers, in_flight, memory_limit)
        rows = slice(first, behind), slice(first, None)
        costs[rows] = _bounds(whole, behind - first, whole.cost)
        repeated[rows] = _bounds(whole, behind - first, whole.repeated)
    return WindowBounds(costs, repeated)


def _bounds(whole: StageProblem, firsts: int, cost: IntArray) -> IntArray:
    """Bounds on the sums of `cost` and the transformations, the best over all prices that are tried.

    Returns
    -------
    IntArray
        Of windows that begin at one of the first `firsts` layers, shape ``(firsts, L + 1)``.
    """
    usage = whole.forward + whole.states
    chain = (
        whole.layouts,
        whole.allowed,
        usage + whole.backward,
        _least(usage, whole.allowed),
        whole.memory_limit,
        firsts,
    )
    least = _window_values(usage, np.zeros_like(whole.transformation), whole.backward, *chain)
    totals = int(cost.max(axis=1).sum()) + int(whole.transformation.max(axis=(1, 2), initial=0).sum())
    shift = price_shift(totals, _PART_BITS)
    used = int((usage + whole.backward).max(axis=1).sum()) + whole.memory_limit
    highest = 2**_PART_BITS // (used + 1)
    best = np.zeros_like(least)
    for slope in _slopes(usage, cost, whole.allowed):
        price = min(int(slope * 2.0**shift), highest)
        scaled = (cost << shift) + price * usage
        change = whole.transformation << shift
        values = _window_values(scaled, change, price * whole.backward, *chain)
        best = np.maximum(best, -((price * whole.memory_limit - values) >> shift))
    best[(least > whole.memory_limit) | (least < 0)] = IMPOSSIBLE
    return best


def _slopes(usage: IntArray, cost: IntArray, allowed: BoolArray) -> list[float]:
    """Prices of a byte at which the best strategy of some layer changes, and 0."""
    found = {0.0}
    for layer in range(len(usage)):
        columns = np.flatnonzero(allowed[layer])
        points = sorted({(int(usage[layer, s]), int(cost[layer, s])) for s in columns})
        hull: list[tuple[int, int]] = []
        for point in points:
            if hull and point[1] >= hull[-1][1]:
                continue
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        found.update(_slope(*pair) for pair in pairwise(hull))
    ordered = sorted(found)
    if len(ordered) <= _MOST_PRICES:
        return ordered
    return [ordered[round(k * (len(ordered) - 1) / (_MOST_PRICES - 1))] for k in range(_MOST_PRICES)]


def _slope(before: tuple[int, int], after: tuple[int, int]) -> float:
    return (before[1] - after[1]) / (after[0] - before[0])


def _least(table: IntArray, allowed: BoolArray) -> IntArray:
    """Least number of every layer; 0 where nothing is allowed."""
    least: IntArray = np.where(allowed, table, IMPOSSIBLE).min(axis=1)
    least[~allowed.any(axis=1)] = 0
    return least


@compiled
def _window_values(
    cost: IntArray,
    transformation: IntArray,
    at_the_end: IntArray,
    layouts: IntArray,
    allowed: BoolArray,
    needed: IntArray,
    held: IntArray,
    memory_limit: int,
    firsts: int,
) -> IntArray:
    """Least sum over every window, with the addition of its last layer, shape ``(firsts, L + 1)``; -1 without a plan.

    A strategy is left out where its backward memory, shape ``(L, S)``, does not fit beside the least memory of the
    layers before, shape ``(L,)``.
    """
    layers, strategies = cost.shape
    count = transformation.shape[1]
    highest = np.iinfo(np.int64).max
    values = np.full((firsts, layers + 1), -1)
    prefix = np.zeros(count, dtype=np.int64)
    by_layout = np.empty(count, dtype=np.int64)
    for first in range(firsts):
        prefix[:] = 0
        held_before = 0
        for layer in range(first, layers):
            if layer > first:
                held_before += held[layer - 1]
                for after in range(count):
                    prefix[after] = highest
                    for before in range(count):
                        if by_layout[before] < highest:
                            total = by_layout[before] + transformation[layer, before, after]
                            prefix[after] = min(prefix[after], total)
            by_layout[:] = highest
            least = highest
            for s in range(strategies):
                fits = held_before + needed[layer, s] <= memory_limit
                if fits and allowed[layer, s] and prefix[layouts[s]] < highest:
                    total = prefix[layouts[s]] + cost[layer, s]
                    by_layout[layouts[s]] = min(by_layout[layouts[s]], total)
                    least = min(least, total + at_the_end[layer, s])
            if least == highest:
                break
            values[first, layer + 1] = least
    return values
