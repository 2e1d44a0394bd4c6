"""What splits of a node gain, learned while branching: pseudo-costs (Benichou et al. 1971).

Of the two parts of a split, mostly one raises its bound at once and the other one not at all. A node is worth a split
where both do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from formulations.encodings.flat import FloatArray

_TRIED = 4
"""Not tunable: nodes of which the parts of a split are bounded before one is split."""


class Split(NamedTuple):
    """How a branch came from another one: a part of the strategies of a node.

    Parameters
    ----------
    node
        The node that was split.
    spread
        How widely its priced usage was spread.
    bound
        Bound of the branch that was split.
    side
        0 for the strategies that use little, 1 for those that use much.
    """

    node: int
    spread: float
    bound: int
    side: int = 0


class Candidate(NamedTuple):
    """A node that may be split, how widely its priced usage is spread, and what the lesser part should gain."""

    node: int
    spread: float
    promised: float


class SplitGains:
    """Gains of the two parts of splits per unit of spread, for every node of a problem."""

    def __init__(self, nodes: int) -> None:
        self._gain: FloatArray = np.zeros((2, nodes))
        self._spread: FloatArray = np.zeros((2, nodes))
        self._parts = 0

    def record(self, split: Split, bound: int) -> None:
        """Learn that the bound of a part was raised to ``bound``."""
        self._gain[split.side, split.node] += max(0, bound - split.bound)
        self._spread[split.side, split.node] += split.spread
        self._parts += 1

    def promised(self, spread: FloatArray) -> FloatArray:
        """Return what the lesser part of a split would gain, by the spread of every node.

        An average part stands beside what is known of a node, so that those without a split count as average.
        """
        gain = float(self._gain.sum())
        if not gain:
            return spread
        average = float(self._spread.sum()) / self._parts
        rates = (self._gain + gain / self._parts) / (self._spread + average)
        promised: FloatArray = spread * rates.min(axis=0)
        return promised

    def candidates(self, spread: FloatArray) -> Iterator[Candidate]:
        """Yield a few nodes whose usage spreads, the most promising first."""
        promised = self.promised(spread)
        for node in np.argsort(-promised, kind="stable")[:_TRIED]:
            if spread[node] > 0.0:
                yield Candidate(int(node), float(spread[node]), float(promised[node]))
