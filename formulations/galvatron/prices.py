"""A price for the memory of a Galvatron-BMW stage: proven lower bounds, and plans along the way.

The last backward step (Eq. 2) keeps the limit as all others do. With a price ``p`` per byte that is in use then, the
least priced cost of a chain is found layer by layer; less ``p`` times the limit it bounds the cost of every feasible
plan from below. Prices are integers in units of ``2**-shift`` quanta, so the bound is one in exact integers. The same
tables bound every completion of a part of a plan, which is what :mod:`formulations.galvatron.labels` prunes with.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from formulations.galvatron.stage import StageProblem
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = ["PricedStage", "best_price", "price_shift"]

_PART_BITS = 59
_LINES = 40


class PricedStage:
    """A stage whose memory can be priced.

    Parameters
    ----------
    stage
        Layers and strategies; every layer has an allowed one.

    Attributes
    ----------
    usage
        Bytes of each layer and strategy at the last backward step, shape ``(L, S)``.
    """

    def __init__(self, stage: StageProblem) -> None:
        self.stage = stage
        self.usage: IntArray = stage.states + stage.forward
        self.usage[-1] += stage.backward[-1]
        costs = int(stage.cost.max(axis=1).sum())
        costs += stage.repeats * int(stage.transformation.max(axis=(1, 2), initial=0).sum())
        self.shift = price_shift(costs, _PART_BITS)
        self.highest = 2**_PART_BITS // (int(self.usage.max(axis=1).sum()) + stage.memory_limit + 1)

    def prefixes(self, price: int) -> IntArray:
        """Least priced cost of all layers before each one, by that one's layout, shape ``(L, C)``."""
        return _prefixes(*self._priced(price), self.stage.layouts, self.stage.allowed)

    def cheapest(self, price: int) -> tuple[int, tuple[int, ...]]:
        """Return the scaled lower bound at a price, and the plan that attains it."""
        value, choices = _cheapest(*self._priced(price), self.stage.layouts, self.stage.allowed)
        return int(value) - price * self.stage.memory_limit, tuple(choices.tolist())

    def usage_of(self, choices: tuple[int, ...]) -> int:
        """Bytes in use at the last backward step."""
        return sum(int(self.usage[layer, s]) for layer, s in enumerate(choices))

    def smallest(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the plan with the least usage and the one with the shortest micro-batch."""
        stage = self.stage
        none = np.zeros_like(stage.transformation)
        _, least = _cheapest(self.usage, none, stage.layouts, stage.allowed)
        _, shortest = _cheapest(stage.repeated, stage.transformation, stage.layouts, stage.allowed)
        return tuple(least.tolist()), tuple(shortest.tolist())

    def _priced(self, price: int) -> tuple[IntArray, IntArray]:
        stage, one = self.stage, 1 << self.shift
        return one * stage.cost + price * self.usage, one * stage.repeats * stage.transformation


def price_shift(total: int, bits: int) -> int:
    """Largest shift by which costs may be scaled.

    Parameters
    ----------
    total
        No sum of costs is larger, in quanta.
    bits
        Bits that a scaled sum may have.

    Raises
    ------
    ValueError
        If the sum has more bits without any scaling.
    """
    shift = bits - (total + 1).bit_length()
    if shift < 0:
        raise ValueError(f"costs sum up to {total} quanta; use a longer quantum, so that they stay below 2**{bits}")
    return shift


def best_price(
    priced: PricedStage, repeated_limit: int | None, offer: Callable[[tuple[int, ...]], None]
) -> tuple[int, int] | None:
    """Find the price of the highest bound: the intersection of a line over the limit and one within it.

    Parameters
    ----------
    priced
        The stage.
    repeated_limit
        Quanta that a micro-batch without synchronisation may take, or None.
    offer
        Called with every plan on the way, feasible or not.

    Returns
    -------
    bound, price or None
        The bound is scaled; None where some limit cannot be kept, which is a proof.
    """
    stage, limit = priced.stage, priced.stage.memory_limit
    within, shortest = priced.smallest()
    offer(within)
    offer(shortest)
    if priced.usage_of(within) > limit:
        return None
    if repeated_limit is not None and stage.repeated_of(shortest) > repeated_limit:
        return None
    value, over = priced.cheapest(0)
    offer(over)
    best = value, 0
    if priced.usage_of(over) <= limit:
        return best
    for _ in range(_LINES):
        saved = priced.usage_of(over) - priced.usage_of(within)
        extra = (stage.cost_of(within) - stage.cost_of(over)) << priced.shift
        price = min(max(extra // saved, 0), priced.highest)
        line = (stage.cost_of(over) << priced.shift) + price * (priced.usage_of(over) - limit)
        value, plan = priced.cheapest(price)
        offer(plan)
        best = max(best, (value, price))
        if value >= line:
            break
        if priced.usage_of(plan) <= limit:
            within = plan
        else:
            over = plan
    return best


@compiled
def _prefixes(cost: IntArray, transformation: IntArray, layouts: IntArray, allowed: BoolArray) -> IntArray:
    layers, strategies = cost.shape
    count = transformation.shape[1]
    highest = np.iinfo(np.int64).max
    prefix = np.zeros((layers, count), dtype=np.int64)
    by_layout = np.empty(count, dtype=np.int64)
    for layer in range(1, layers):
        by_layout[:] = highest
        for s in range(strategies):
            if allowed[layer - 1, s]:
                total = prefix[layer - 1, layouts[s]] + cost[layer - 1, s]
                by_layout[layouts[s]] = min(by_layout[layouts[s]], total)
        for after in range(count):
            least = highest
            for before in range(count):
                if by_layout[before] < highest:
                    least = min(least, by_layout[before] + transformation[layer, before, after])
            prefix[layer, after] = least
    return prefix


@compiled
def _cheapest(cost: IntArray, transformation: IntArray, layouts: IntArray, allowed: BoolArray) -> tuple[int, IntArray]:
    """Least cost of a chain and the strategies that attain it."""
    layers, strategies = cost.shape
    prefix = _prefixes(cost, transformation, layouts, allowed)
    choices = np.zeros(layers, dtype=np.int64)
    value = np.iinfo(np.int64).max
    for layer in range(layers - 1, -1, -1):
        least = np.iinfo(np.int64).max
        for s in range(strategies):
            if not allowed[layer, s]:
                continue
            total = prefix[layer, layouts[s]] + cost[layer, s]
            if layer < layers - 1:
                total += transformation[layer + 1, layouts[s], layouts[choices[layer + 1]]]
            if total < least:
                least = total
                choices[layer] = s
        if layer == layers - 1:
            value = least
    return value, choices
