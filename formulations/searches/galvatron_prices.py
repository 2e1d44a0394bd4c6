"""Prices for the memory and the time of a Galvatron-BMW stage: proven lower bounds, and plans along the way.

With a price ``p`` per byte of what is in use at the last layer's backward step, and ``q`` per quantum of a micro-batch
without synchronisation, the least priced cost of a chain is found layer by layer; less ``p`` times the memory limit and
``q`` times the time limit it bounds the cost of every feasible plan from below. Prices are integers in units of
``2**-shift`` quanta, so the bound is one in exact integers. The same tables bound every completion of a part of a plan,
which is what :mod:`formulations.searches.galvatron_labels` prunes with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from formulations.compiled import compiled
from formulations.models.galvatron import StageProblem
from formulations.problem import BoolArray, IntArray

__all__ = ["PricedStage", "Prices", "best_prices", "price_shift"]

_PART_BITS = 59
_LINES = 40
_HALVINGS = 16


@dataclass(frozen=True, slots=True)
class Prices:
    """What a byte and a quantum are worth, in units of ``2**-shift`` quanta."""

    memory: int = 0
    repeated: int = 0


class PricedStage:
    """A stage whose usage can be priced.

    Parameters
    ----------
    stage
        Layers and strategies; every layer has an allowed one.
    repeated_limit
        Quanta that a micro-batch without synchronisation may take, or None.
    """

    def __init__(self, stage: StageProblem, repeated_limit: int | None) -> None:
        self.stage = stage
        self.repeated_limit = repeated_limit
        self.usage = stage.forward + stage.states
        self.usage[-1] += stage.backward[-1]
        transformation = int(stage.transformation.max(axis=(1, 2), initial=0).sum())
        costs = int(stage.cost.max(axis=1).sum()) + stage.repeats * transformation
        self.shift = price_shift(costs, _PART_BITS)
        usage = int(self.usage.max(axis=1).sum()) + stage.memory_limit
        repeated = int(stage.repeated.max(axis=1).sum()) + transformation + (repeated_limit or 0)
        self.highest = Prices(2**_PART_BITS // (usage + 1), 2**_PART_BITS // (repeated + 1))

    def prefixes(self, prices: Prices) -> IntArray:
        """Least priced cost of all layers before each one, by that one's layout, shape ``(L, C)``."""
        return _prefixes(*self._priced(prices), self.stage.layouts, self.stage.allowed)

    def cheapest(self, prices: Prices) -> tuple[int, tuple[int, ...]]:
        """Return the scaled lower bound at these prices, and the plan that attains it."""
        value, choices = _cheapest(*self._priced(prices), self.stage.layouts, self.stage.allowed)
        return int(value) - self.paid(prices), tuple(choices.tolist())

    def paid(self, prices: Prices) -> int:
        """What the limits are worth."""
        return prices.memory * self.stage.memory_limit + prices.repeated * (self.repeated_limit or 0)

    def usage_of(self, choices: tuple[int, ...]) -> int:
        """Bytes in use at the last layer's backward step."""
        return sum(int(self.usage[layer, s]) for layer, s in enumerate(choices))

    def scaled_cost(self, choices: tuple[int, ...], repeated_price: int) -> int:
        """Cost with the time of a micro-batch priced, and its limit not subtracted."""
        return (self.stage.cost_of(choices) << self.shift) + repeated_price * self.stage.repeated_of(choices)

    def smallest(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the plan with the least usage and the one with the shortest micro-batch."""
        stage = self.stage
        none = np.zeros_like(stage.transformation)
        _, least = _cheapest(self.usage, none, stage.layouts, stage.allowed)
        _, shortest = _cheapest(stage.repeated, stage.transformation, stage.layouts, stage.allowed)
        return tuple(least.tolist()), tuple(shortest.tolist())

    def _priced(self, prices: Prices) -> tuple[IntArray, IntArray]:
        stage, one = self.stage, 1 << self.shift
        cost = one * stage.cost + prices.memory * self.usage + prices.repeated * stage.repeated
        return cost, (one * stage.repeats + prices.repeated) * stage.transformation


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


def best_prices(priced: PricedStage, offer: Callable[[tuple[int, ...]], None]) -> Prices | None:
    """Find prices of a high bound.

    Parameters
    ----------
    priced
        The stage.
    offer
        Hears of every plan that is met, feasible or not.

    Returns
    -------
    Prices or None
        None where some limit cannot be kept, which is a proof.
    """
    least, shortest = priced.smallest()
    offer(least)
    offer(shortest)
    limit = priced.repeated_limit
    if priced.usage_of(least) > priced.stage.memory_limit:
        return None
    if limit is not None and priced.stage.repeated_of(shortest) > limit:
        return None
    best, value, plan = _best_memory_price(priced, least, 0, offer)
    if limit is None or priced.stage.repeated_of(plan) <= limit:
        return best
    low, high = 0, min(1 << priced.shift, priced.highest.repeated)
    widening = True
    for _ in range(2 * _HALVINGS):
        price = high if widening else (low + high) // 2
        found, found_value, plan = _best_memory_price(priced, least, price, offer)
        if found_value > value:
            best, value = found, found_value
        if priced.stage.repeated_of(plan) <= limit:
            high, widening = price, False
        else:
            low = price
            high = min(2 * high, priced.highest.repeated) if widening else high
        if high - low <= 1 or (not widening and high - low <= high >> _HALVINGS):
            break
    return best


def _best_memory_price(
    priced: PricedStage, least: tuple[int, ...], repeated_price: int, offer: Callable[[tuple[int, ...]], None]
) -> tuple[Prices, int, tuple[int, ...]]:
    """The best memory price at a price of time: where the lines of two plans, one over the limit and one not, meet.

    Returns
    -------
    prices, value, plan
        The price, its scaled bound, and the cheapest plan met that keeps the memory limit at the last step.
    """
    limit = priced.stage.memory_limit
    prices = Prices(0, repeated_price)
    value, over = priced.cheapest(prices)
    offer(over)
    if priced.usage_of(over) <= limit:
        return prices, value, over
    best, within = (prices, value), least
    for _ in range(_LINES):
        saved = priced.usage_of(over) - priced.usage_of(within)
        extra = priced.scaled_cost(within, repeated_price) - priced.scaled_cost(over, repeated_price)
        prices = Prices(min(max(extra // saved, 0), priced.highest.memory), repeated_price)
        line = priced.scaled_cost(over, repeated_price) + prices.memory * priced.usage_of(over) - priced.paid(prices)
        value, plan = priced.cheapest(prices)
        offer(plan)
        best = max(best, (prices, value), key=lambda found: found[1])
        if value >= line:
            break
        if priced.usage_of(plan) <= limit:
            within = plan
        else:
            over = plan
    return *best, within


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
