"""A price for the memory of a Galvatron-BMW stage: proven lower bounds, and plans along the way.

Every backward step (Eq. 2) keeps the limit; so does every weighted mean of them. With a price ``p`` per byte of such a
mean, the least priced cost of a chain is found layer by layer; less ``p`` times the limit it bounds the cost of every
feasible plan from below. Prices and weights are integers, prices in units of ``2**-shift`` quanta, so the bound is one
in exact integers. The same tables bound every completion of a part of a plan, which is what
:mod:`formulations.galvatron.labels` prunes with.

Where all layers are alike the last backward step is the fullest one. Where the layers at the end hold little, as a
decoder on four tokens does, an earlier one is: :func:`best_priced` moves the weight to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from formulations.galvatron.stage import StageProblem
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = ["PricedStage", "best_priced", "price_shift"]

_PART_BITS = 59
_LINES = 40
_WEIGHT = 64
"""Sum of the weights of all backward steps."""

_ROUNDS = 12
_LITTLE_OVER = 1e-6


class PricedStage:
    """A stage whose memory can be priced.

    Parameters
    ----------
    stage
        Layers and strategies; every layer has an allowed one.
    weights
        Of the backward step of every layer in the mean that is priced, shape ``(L,)``.

    Attributes
    ----------
    weight_from
        Sum of the weights of every layer and those behind it, shape ``(L,)``; the first is that of all.
    usage
        Weighted bytes of each layer and strategy, shape ``(L, S)``.
    memory_limit
        Limit on their sum.
    """

    def __init__(self, stage: StageProblem, weights: IntArray) -> None:
        self.stage = stage
        self.weight_from: IntArray = weights[::-1].cumsum()[::-1]
        self.memory_limit = int(self.weight_from[0]) * stage.memory_limit
        self.usage: IntArray = (
            self.weight_from[0] * stage.states
            + self.weight_from[:, None] * stage.forward
            + weights[:, None] * stage.backward
        )
        costs = int(stage.cost.max(axis=1).sum())
        costs += stage.repeats * int(stage.transformation.max(axis=(1, 2), initial=0).sum())
        self.shift = price_shift(costs, _PART_BITS)
        self.highest = 2**_PART_BITS // (int(self.usage.max(axis=1).sum()) + self.memory_limit + 1)

    def prefixes(self, price: int) -> IntArray:
        """Least priced cost of all layers before each one, by that one's layout, shape ``(L, C)``."""
        return _prefixes(*self._priced(price), self.stage.layouts, self.stage.allowed)

    def cheapest(self, price: int) -> tuple[int, tuple[int, ...]]:
        """Return the scaled lower bound at a price, and the plan that attains it."""
        value, choices = _cheapest(*self._priced(price), self.stage.layouts, self.stage.allowed)
        return int(value) - price * self.memory_limit, tuple(choices.tolist())

    def usage_of(self, choices: tuple[int, ...]) -> int:
        """Weighted bytes in use."""
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


@dataclass(frozen=True, slots=True)
class _AtLimit:
    """The price of the highest bound, and the two plans whose lines intersect there.

    Parameters
    ----------
    price, value
        The price, and its scaled bound.
    within, over
        The cheapest plans found with weighted bytes within the limit, and over it; the same one if the cheapest plan is
        within.
    share
        Of ``over`` in a mean of both that just keeps the limit.
    """

    price: int
    value: int
    within: tuple[int, ...]
    over: tuple[int, ...]
    share: float

    def fullest_step(self, stage: StageProblem) -> int | None:
        """The backward step at which the mean of both plans is most over the limit, or None if it never is."""
        used = (1 - self.share) * stage.step_bytes(self.within) + self.share * stage.step_bytes(self.over)
        fullest = int(used.argmax())
        return fullest if used[fullest] > stage.memory_limit * (1 + _LITTLE_OVER) else None


def best_priced(
    stage: StageProblem, repeated_limit: int | None, offer: Callable[[tuple[int, ...]], None]
) -> tuple[PricedStage, int, int] | None:
    """Find weights of the backward steps and a price of a high bound.

    One plan within the memory limit and one above it determine the step that their mean exceeds most; weight moves
    there as long as the bound rises (Frank-Wolfe steps).

    Parameters
    ----------
    stage
        Layers and strategies.
    repeated_limit
        Quanta that a micro-batch without synchronisation may take, or None.
    offer
        Called with every plan on the way, feasible or not.

    Returns
    -------
    priced, bound, price or None
        The bound is scaled; None where some limit cannot be kept, which is a proof.
    """
    weights = np.zeros(stage.layers, dtype=np.int64)
    weights[-1] = moved = _WEIGHT
    trial = weights
    best: tuple[PricedStage, _AtLimit] | None = None
    for _ in range(_ROUNDS):
        priced = PricedStage(stage, trial)
        found = _best_price(priced, repeated_limit, offer)
        if found is None:
            return None
        if best is None or found.value > best[1].value:
            weights, best = trial, (priced, found)
        else:
            moved //= 2
        fullest = best[1].fullest_step(stage)
        if fullest is None or moved == 0:
            break
        trial = weights * (_WEIGHT - moved) // _WEIGHT
        trial[fullest] += _WEIGHT - trial.sum()
    assert best is not None, "there is a round"
    return best[0], best[1].value, best[1].price


def _best_price(
    priced: PricedStage, repeated_limit: int | None, offer: Callable[[tuple[int, ...]], None]
) -> _AtLimit | None:
    """The price of the highest bound: the intersection of a line over the limit and one within it.

    None where some limit cannot be kept, which is a proof.
    """
    stage, limit = priced.stage, priced.memory_limit
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
        return _AtLimit(0, value, over, over, 0.0)
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
    share = (limit - priced.usage_of(within)) / (priced.usage_of(over) - priced.usage_of(within))
    return _AtLimit(best[1], best[0], within, over, share)


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
