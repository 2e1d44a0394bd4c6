"""The two parts into which the strategies of a node are split.

Memory is what keeps relaxations from being decisions: they mix strategies that use much and little to meet a limit
exactly. So a node that is mixed is split at its mean usage, at the relaxation's prices, into the strategies that use
little and those that use much; neither part holds the mixture. Where strategies are mixed that use the same, half of
the relaxation's weight goes to either side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from formulations.encodings.flat import FloatArray
from formulations.problem.strategy_problem import BoolArray, IntArray

_DECIDED = 1e-4
"""Not tunable: a relaxation this close to a decision is one."""

_LEAST_WEIGHT = 1e-6
"""Not tunable: weights of nodes below it are rounding errors."""

_EQUAL = 1e-6
"""Not tunable: usages whose spread is so small a part of the largest are the same."""


class Mixture(NamedTuple):
    """How a relaxation mixes the strategies of every node.

    Parameters
    ----------
    offset
        Where the strategies of every node begin.
    allowed
        Flags of the strategies that are left.
    weight
        How much of every strategy the relaxation chooses; all ones where there is none.
    priced
        What the usage of every strategy costs at the relaxation's prices.
    """

    offset: IntArray
    allowed: BoolArray
    weight: FloatArray
    priced: FloatArray

    def undecided(self) -> BoolArray:
        """Flags of the nodes of which no strategy has all the weight."""
        sizes = np.add.reduceat(self.allowed, self.offset[:-1], dtype=np.int64)
        most = np.maximum.reduceat(np.where(self.allowed, self.weight, 0.0), self.offset[:-1])
        flags: BoolArray = (sizes > 1) & (most < 1.0 - _DECIDED)
        return flags

    def spread(self) -> FloatArray:
        """Standard deviation of every node's priced usage; zero where it is decided."""
        starts = self.offset[:-1]
        weight = np.where(self.allowed, self.weight, 0.0)
        total = np.maximum(np.add.reduceat(weight, starts), _LEAST_WEIGHT)
        mean = np.add.reduceat(weight * self.priced, starts) / total
        square = np.add.reduceat(weight * self.priced**2, starts) / total
        found: FloatArray = np.sqrt(np.maximum(square - mean**2, 0.0))
        found[~self.undecided() | (found <= _EQUAL * np.maximum.reduceat(self.priced, starts))] = 0.0
        return found

    def halves(self, node: int) -> tuple[BoolArray, BoolArray]:
        """Flags of what is left on either side of a split: of little usage, or heavier, on the first side."""
        first, end = self.offset[node], self.offset[node + 1]
        own = first + np.flatnonzero(self.allowed[first:end])
        weight, priced = self.weight[own], self.priced[own]
        little = priced <= weight @ priced / max(weight.sum(), _LEAST_WEIGHT)
        if self.spread()[node] == 0.0 or not weight[little].any() or not weight[~little].any():
            order = np.argsort(-weight, kind="stable")
            summed = np.cumsum(weight[order])
            count = min(1 + int(np.searchsorted(summed, 0.5 * summed[-1])), len(own) - 1)
            little = np.zeros(len(own), dtype=np.bool_)
            little[order[:count]] = True
        below, above = self.allowed.copy(), self.allowed.copy()
        below[own[~little]] = False
        above[own[little]] = False
        return below, above
