"""Pareto fronts of weight and cost, added up exactly.

The dynamic programme of a knapsack usually has a table over units of weight. A list of the sums that are not dominated
needs no unit, so nothing is rounded, choices that weigh nothing are like any other, and equal operators collapse into
few sums. Every step writes a list of its own and reads only earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from formulations.problem.strategy_problem import BoolArray, IntArray

Keep = Callable[[IntArray, IntArray], BoolArray]
"""Filter of sums, by their weights and costs."""

_MOST_PAIRS = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """Sums of choices, ascending by weight and strictly descending by cost.

    Parameters
    ----------
    weight, cost
        Of every sum, shape ``(P,)``.
    index
        Of a single class: the choice behind every sum, shape ``(P,)``. Of two fronts together: which sum of the first
        and which of the second, shapes ``(P,)`` each.
    parts
        The two fronts; empty for a single class.
    """

    weight: IntArray
    cost: IntArray
    index: tuple[IntArray, ...]
    parts: tuple[Front, ...] = ()

    def __len__(self) -> int:
        return len(self.weight)

    def choices(self, point: int) -> list[int]:
        """Choices behind a sum, one for each class that was added, in the order in which they were."""
        if not self.parts:
            return [int(self.index[0][point])]
        return [
            choice
            for part, index in zip(self.parts, self.index, strict=True)
            for choice in part.choices(int(index[point]))
        ]


def single(weight: IntArray, cost: IntArray, allowed: BoolArray) -> Front:
    """Front of one class.

    Parameters
    ----------
    weight, cost, allowed
        Of every choice, shape ``(S,)``; at least one must be allowed.
    """
    choices = np.flatnonzero(allowed)
    kept = choices[undominated(weight[choices], cost[choices])]
    return Front(weight[kept], cost[kept], (kept,))


def undominated(weight: IntArray, cost: IntArray) -> IntArray:
    """Indices of undominated choices, ascending by weight; one of equals."""
    order = np.lexsort((cost, weight))
    ascending = cost[order]
    best_before = np.minimum.accumulate(ascending)
    kept = np.ones(len(order), dtype=np.bool_)
    kept[1:] = ascending[1:] < best_before[:-1]
    return order[kept]


def together(first: Front, second: Front, keep: Keep | None = None) -> Front:
    """Front of the sums of two fronts that pass a filter; it may be empty."""
    rows = max(1, _MOST_PAIRS // max(1, len(second)))
    pieces = [_block(first, second, start, start + rows, keep) for start in range(0, len(first), rows)]
    weight, cost, left, right = (np.concatenate(column) for column in zip(*pieces, strict=True))
    kept = slice(None) if len(pieces) == 1 else undominated(weight, cost)
    return Front(weight[kept], cost[kept], (left[kept], right[kept]), (first, second))


def _block(
    first: Front, second: Front, start: int, end: int, keep: Keep | None
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Undominated sums of some points of the first front with all of the second: weights, costs and both indices."""
    weight = (first.weight[start:end, None] + second.weight).ravel()
    cost = (first.cost[start:end, None] + second.cost).ravel()
    kept = np.arange(len(weight)) if keep is None else np.flatnonzero(keep(weight, cost))
    kept = kept[undominated(weight[kept], cost[kept])]
    left, right = np.divmod(kept, len(second))
    return weight[kept], cost[kept], left + start, right


def repeated(front: Front, count: int) -> Front:
    """Front of ``count`` equal classes, by doubling."""
    if count == 1:
        return front
    half = repeated(front, count // 2)
    twice = together(half, half)
    return together(twice, front) if count % 2 else twice
