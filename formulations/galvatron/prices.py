"""Prices for the memory and the time of a Galvatron-BMW stage: proven lower bounds, and plans along the way.

The peak is that of the backward steps of all layers (Eq. 2), each of which keeps the limit; so does every weighted mean
of them. With a price ``p`` per byte of such a mean, and ``q`` per quantum of a micro-batch without synchronisation, the
least priced cost of a chain is found layer by layer; less ``p`` times the memory limit and ``q`` times the time limit
it bounds the cost of every feasible plan from below. Prices and weights are integers, prices in units of ``2**-shift``
quanta, so the bound is one in exact integers. The same tables bound every completion of a part of a plan, which is
what :mod:`formulations.galvatron.labels` prunes with.

Where all layers are alike the last backward step is the fullest one. Where the layers at the end hold little, as a
decoder on four tokens does, an earlier one is: :func:`best_weights` moves the weight to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from formulations.galvatron.stage import StageProblem
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = ["PricedStage", "Prices", "best_prices", "best_weights", "price_shift"]

_PART_BITS = 59
_LINES = 40
_HALVINGS = 16
_WEIGHT = 64
"""Sum of the weights of all backward steps."""

_ROUNDS = 12
_LITTLE_OVER = 1e-6


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a byte and of a quantum, in units of ``2**-shift`` quanta."""

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
    weights
        Of the backward step of every layer in the mean that is priced, shape ``(L,)``; None for the last one alone.

    Attributes
    ----------
    weight_from
        Sum of the weights of every layer and those behind it, shape ``(L,)``; the first is that of all.
    usage
        Weighted bytes of each layer and strategy, shape ``(L, S)``.
    memory_limit
        Limit on their sum.
    """

    def __init__(self, stage: StageProblem, repeated_limit: int | None, weights: IntArray | None = None) -> None:
        self.stage = stage
        self.repeated_limit = repeated_limit
        self.weights = _all_on(stage.layers - 1, stage.layers, 1) if weights is None else weights
        self.weight_from: IntArray = self.weights[::-1].cumsum()[::-1]
        self.memory_limit = int(self.weight_from[0]) * stage.memory_limit
        self.usage: IntArray = (
            self.weight_from[0] * stage.states
            + self.weight_from[:, None] * stage.forward
            + self.weights[:, None] * stage.backward
        )
        transformation = int(stage.transformation.max(axis=(1, 2), initial=0).sum())
        costs = int(stage.cost.max(axis=1).sum()) + stage.repeats * transformation
        self.shift = price_shift(costs, _PART_BITS)
        usage = int(self.usage.max(axis=1).sum()) + self.memory_limit
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
        """Value of the limits at the prices."""
        return prices.memory * self.memory_limit + prices.repeated * (self.repeated_limit or 0)

    def usage_of(self, choices: tuple[int, ...]) -> int:
        """Weighted bytes in use."""
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
        Called with every plan on the way, feasible or not.

    Returns
    -------
    Prices or None
        None where some limit cannot be kept, which is a proof.
    """
    least, shortest = priced.smallest()
    offer(least)
    offer(shortest)
    limit = priced.repeated_limit
    if priced.usage_of(least) > priced.memory_limit:
        return None
    if limit is not None and priced.stage.repeated_of(shortest) > limit:
        return None
    best = _best_memory_price(priced, least, 0, offer)
    if limit is None or priced.stage.repeated_of(best.within) <= limit:
        return best.prices
    low, high = 0, min(1 << priced.shift, priced.highest.repeated)
    widening = True
    for _ in range(2 * _HALVINGS):
        price = high if widening else (low + high) // 2
        found = _best_memory_price(priced, least, price, offer)
        best = max(best, found, key=lambda priced: priced.value)
        if priced.stage.repeated_of(found.within) <= limit:
            high, widening = price, False
        else:
            low = price
            high = min(2 * high, priced.highest.repeated) if widening else high
        if high - low <= 1 or (not widening and high - low <= high >> _HALVINGS):
            break
    return best.prices


def best_weights(stage: StageProblem, offer: Callable[[tuple[int, ...]], None]) -> IntArray | None:
    """Find weights of the backward steps whose mean gives a high bound.

    The mean of one plan within the memory limit and one above it determines the step that is most over the limit;
    weight moves there as long as the bound rises (Frank-Wolfe steps).

    Parameters
    ----------
    stage
        Layers and strategies.
    offer
        Called with every plan on the way, feasible or not.

    Returns
    -------
    IntArray or None
        Shape ``(L,)``; None where memory forbids all plans, which is a proof.
    """
    weights = trial = _all_on(stage.layers - 1, stage.layers, _WEIGHT)
    best: _AtLimit | None = None
    moved = _WEIGHT
    for _ in range(_ROUNDS):
        priced = PricedStage(stage, None, trial)
        least, _ = priced.smallest()
        offer(least)
        if priced.usage_of(least) > priced.memory_limit:
            return None
        found = _best_memory_price(priced, least, 0, offer)
        if best is None or found.value > best.value:
            weights, best = trial, found
        else:
            moved //= 2
        fullest = best.fullest_step(stage)
        if fullest is None or moved == 0:
            break
        trial = weights * (_WEIGHT - moved) // _WEIGHT
        trial[fullest] += _WEIGHT - trial.sum()
    return weights


def _all_on(layer: int, layers: int, weight: int) -> IntArray:
    weights = np.zeros(layers, dtype=np.int64)
    weights[layer] = weight
    return weights


@dataclass(frozen=True, slots=True)
class _AtLimit:
    """The best price of weighted bytes, and the two plans whose lines intersect there.

    Parameters
    ----------
    prices, value
        The price, and its scaled bound.
    within, over
        The cheapest plans found with weighted bytes within the limit, and over it; the same one if the cheapest plan
        is within.
    share
        Of `over` in a mean of both that just keeps the limit.
    """

    prices: Prices
    value: int
    within: tuple[int, ...]
    over: tuple[int, ...]
    share: float

    def fullest_step(self, stage: StageProblem) -> int | None:
        """The backward step at which the mean of both plans is most over the limit, or None if it never is."""
        used = (1 - self.share) * stage.step_bytes(self.within) + self.share * stage.step_bytes(self.over)
        fullest = int(used.argmax())
        return fullest if used[fullest] > stage.memory_limit * (1 + _LITTLE_OVER) else None


def _best_memory_price(
    priced: PricedStage, least: tuple[int, ...], repeated_price: int, offer: Callable[[tuple[int, ...]], None]
) -> _AtLimit:
    """The best memory price at a price of time: the intersection of a line over the limit and one within it."""
    limit = priced.memory_limit
    prices = Prices(0, repeated_price)
    value, over = priced.cheapest(prices)
    offer(over)
    if priced.usage_of(over) <= limit:
        return _AtLimit(prices, value, over, over, 0.0)
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
    share = (limit - priced.usage_of(within)) / (priced.usage_of(over) - priced.usage_of(within))
    return _AtLimit(*best, within, over, share)


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
