"""What is left to gain at isolated nodes once single moves gain nothing: exchanges, and knapsacks at full rows."""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, Usage
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.knapsack_rows import fill_rows
from formulations.solvers.local_search.multiple_choice_knapsack import exchange, index_rows, isolated_nodes
from formulations.solvers.local_search.tunables import (
    EXCHANGE_WORK,
    FULL_FROM,
    HOPED_GAIN,
    KNAPSACKS_AT_ONCE,
    LONGEST_PAUSE,
)

_KNAPSACKS = True
"""Technique: knapsacks of the isolated nodes that compete for a full row."""


class IsolatedMoves:
    """Moves of isolated nodes, and where in turn they go on; deterministic.

    Attributes
    ----------
    hoped_gain
        What the next call may gain, judged by the last one.
    """

    def __init__(self, flat: FlatProblem) -> None:
        self.hoped_gain = 0.0
        self._flat = flat
        self._nodes = isolated_nodes(flat.graph, flat.usage)
        self._index = index_rows(flat.usage, self._nodes)
        users = max(1.0, len(self._index.node) / (len(self._index.start) - 1))
        self._takers_at_once = max(1, int(EXCHANGE_WORK / users))
        self._next_taker = self._next_row = 0
        self._pause = self._waited = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def improve(
        self,
        rows: Usage,
        priced: FloatArray,
        prices: FloatArray,
        choices: IntArray,
        usage_now: FloatArray,
        tolerance: float,
    ) -> None:
        """Gain what exchanges and knapsacks can; knapsacks pause longer and longer while they gain nothing.

        Parameters
        ----------
        rows
            Usage of the flat problem, perhaps with lower limits.
        priced
            Costs of nodes at ``prices``, laid out as ``unary``.
        prices
            Of rows; those with a price are where isolated nodes compete.
        choices
            Any assignment within the limits; stays so, and never costs more. Changed in place.
        usage_now
            Usage of every row; changed in place.
        tolerance
            Least gain of a move, in cost.
        """
        gain = self._exchange(rows, choices, usage_now, tolerance)
        self._waited += 1
        if _KNAPSACKS and self._waited > self._pause:
            found = self._fill_rows(rows, priced, prices, choices, usage_now, tolerance)
            self._pause = 0 if found else min(LONGEST_PAUSE, 2 * self._pause + 1)
            self._waited = 0
            gain += found
        self.hoped_gain = HOPED_GAIN * gain

    def _exchange(self, rows: Usage, choices: IntArray, usage_now: FloatArray, tolerance: float) -> float:
        count = min(len(self._nodes), self._takers_at_once)
        takers = np.take(self._nodes, np.arange(self._next_taker, self._next_taker + count), mode="wrap")
        self._next_taker = (self._next_taker + count) % len(self._nodes)
        flat = self._flat
        return exchange(flat.graph, rows, flat.unary, choices, takers, self._index, usage_now, tolerance)

    def _fill_rows(
        self,
        rows: Usage,
        priced: FloatArray,
        prices: FloatArray,
        choices: IntArray,
        usage_now: FloatArray,
        tolerance: float,
    ) -> float:
        full = np.flatnonzero((prices > 0) & (usage_now > FULL_FROM * rows.limit))
        gain = 0.0
        for row in full[(self._next_row + np.arange(min(KNAPSACKS_AT_ONCE, len(full)))) % max(1, len(full))]:
            gain += fill_rows(
                self._flat.graph,
                rows,
                self._flat.unary,
                priced,
                choices,
                self._index,
                int(row),
                usage_now,
                tolerance,
            )
        self._next_row += KNAPSACKS_AT_ONCE
        return gain
