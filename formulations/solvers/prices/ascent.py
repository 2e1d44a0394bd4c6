"""Memory prices by smoothed Newton ascent, with tree-reweighted messages as reparametriser.

After each pair of sweeps the min-marginals say how nodes and factors would respond to a change of prices
(:mod:`formulations.solvers.prices.dual_model`); the temperature of that response falls geometrically. Only
candidate rows take part: block maxima of the expected usage near or over the limit, and rows with a price.

Prices move at messages that were settled at the prices before, so that steps are short and go the same way for long.
The bound is concave in prices and messages together. So every few steps a line search goes on in the direction in which
both have moved since the last one.
"""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, Graph, Usage, message_entries
from formulations.encodings.priced_costs import PricedCosts
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.prices.dual_model import gather_blocks, newton_step, soft_usage
from formulations.solvers.prices.raised_prices import block_peaks
from formulations.solvers.prices.trws import sweep
from formulations.solvers.prices.tunables import (
    ASCENT_NEAR_LIMIT,
    COLD_TEMPERATURE,
    EXTRAPOLATED_STEPS,
    PAIRS,
    ROWS,
    WARM_TEMPERATURE,
)

_NEWTON_ITERATIONS = 4
"""Not tunable: of a smooth function within a bounded step; after four it hardly moves."""

_REACH = 60.0
"""Not tunable: temperatures above the least energy up to which entries take part in a step at first. They are few of a
large table; a cold step that runs to its cap without the others is made again with all."""

_REACHES_MOST = 2.0
"""Not tunable: typical distances within which most entries that a step could make likely are."""

_LONGEST = 1024.0
"""Not tunable: lengths of a line search, in units of what steps have moved, end there; where nothing fits, the bound
grows without end."""


class PriceAscent:
    """Prices, messages and bounds of one flat problem.

    Attributes
    ----------
    prices
        Present price per unit of usage of every row.
    choices
        The assignment that the last sweep decoded.
    best_bound, best_prices, best_messages
        The highest (floating-point) bound so far and where it was found.
    """

    def __init__(self, flat: FlatProblem) -> None:
        self.flat = flat
        graph = flat.graph
        nodes = len(graph.sizes)
        self.prices: FloatArray = np.zeros(len(flat.usage.limit))
        self.messages: FloatArray = np.zeros(message_entries(graph))
        self.choices: IntArray = np.zeros(nodes, dtype=np.int64)
        self._costs = PricedCosts(flat)
        self.unary, self.tables = self._costs.unary, self._costs.tables
        self.iterations = 0
        self._order: IntArray = np.arange(nodes, dtype=np.int64)
        self._beliefs: FloatArray = np.zeros(len(flat.unary))
        self._share: FloatArray = np.ones(nodes)
        self.best_bound = -np.inf
        self.best_prices = self.prices.copy()
        self.best_messages = self.messages.copy()
        self._base = self.best_prices, self.best_messages
        self._length = 4.0
        self._rows: IntArray = np.zeros(0, dtype=np.int64)

    def start_from(self, prices: FloatArray, messages: FloatArray) -> None:
        """Go on from prices and messages that were found elsewhere; the best bound is forgotten."""
        self.prices, self.messages = prices.copy(), messages.copy()
        self.best_bound = -np.inf
        self.best_prices, self.best_messages = self.prices.copy(), self.messages.copy()
        self._base = self.best_prices, self.best_messages

    def sweeps(self, pairs: int) -> float:
        """Run pairs of sweeps at the present prices; return the bound and keep it where it is the best."""
        self.set_costs()
        bound = 0.0
        for _ in range(pairs):
            bound = self.sweep_pair()
        bound -= float(self.prices @ self.flat.usage.limit)
        if bound > self.best_bound:
            self.best_bound = bound
            self.best_prices = self.prices.copy()
            self.best_messages = self.messages.copy()
        return bound

    def decode(self, prices: FloatArray, pairs: int) -> IntArray:
        """Return an assignment decoded at ``prices``, from the present messages, which stay as they are."""
        messages = self.messages.copy()
        own = self.prices
        self.prices = prices
        self.set_costs()
        for _ in range(pairs):
            self._sweep(forward=False)
            self._sweep(forward=True)
        self.messages, self.prices = messages, own
        self.set_costs()
        return self.choices.copy()

    def set_costs(self) -> None:
        """Write costs at the present prices."""
        self._costs.set(self.prices)

    def temperature_scale(self) -> float:
        """Return a typical distance between a node's best and its other strategies."""
        beliefs = self._beliefs
        typical = beliefs[(beliefs > 0) & (beliefs < 0.1 * self.flat.penalty)]
        return float(np.median(typical)) if len(typical) else 1.0

    def step(self, progress: float, pairs: int = PAIRS, same_rows: bool = False) -> float:
        """Move the prices once and sweep ``pairs`` times; return the new bound.

        ``progress`` from 0 to 1 cools the response. With ``same_rows`` the rows of the last step take part, which saves
        finding out what all others would use.
        """
        flat = self.flat
        self.iterations += 1
        typical = self.temperature_scale()
        cooling = (COLD_TEMPERATURE / WARM_TEMPERATURE) ** min(1.0, max(0.0, progress))
        temperature = typical * WARM_TEMPERATURE * cooling
        if not same_rows:
            self._rows = self._candidate_rows(temperature)
        rows = self._rows
        if len(rows):
            decisions = int((flat.graph.sizes > 1).sum()) or 1
            limits = np.maximum(flat.usage.limit[rows], 1.0)
            scaled = self.prices[rows] * limits
            most_change = 0.3 * max(typical * decisions, float(scaled.sum()))
            for reach in (_REACH * temperature, np.inf):
                blocks = gather_blocks(*self._view(), rows, reach)
                change = newton_step(blocks, scaled, temperature, _NEWTON_ITERATIONS, most_change)
                # Far from the best prices a step runs to its cap anyhow; close to them, without what was left out.
                if reach > _REACHES_MOST * typical or float(np.abs(change).sum()) < most_change:
                    break
            moved = np.maximum(0.0, scaled + change)
            moved[moved < 1e-7 * moved.max()] = 0.0
            others = np.ones(len(self.prices), dtype=np.bool_)
            others[rows] = False
            self.prices[others] *= 0.5
            self.prices[rows] = moved / limits
        bound = self.sweeps(pairs)
        if self.iterations % EXTRAPOLATED_STEPS == 0 and len(rows):
            return self._extrapolate(bound)
        return bound

    def _extrapolate(self, bound: float) -> float:
        """Search along what the best prices and messages have moved since the last search; return the bound there.

        Where nothing better is found, the ascent goes on from where it was, at ``bound``.
        """
        base, self._base = self._base, (self.best_prices, self.best_messages)
        if base[1] is self.best_messages or self.best_bound > 1e-2 * self.flat.penalty:
            return bound
        own, (prices, messages) = (self.prices, self.messages), self._base
        while self._length < _LONGEST:
            before = self.best_bound
            self.prices = np.maximum(0.0, prices + self._length * (prices - base[0]))
            self.messages = messages + self._length * (messages - base[1])
            self.sweeps(1)
            if self.best_bound <= before:
                break
            self._length *= 2.0
        self._length = max(1.0, self._length / 2.0)
        is_better = self.best_messages is not messages
        self.prices, self.messages = (self.best_prices.copy(), self.best_messages.copy()) if is_better else own
        return self.sweeps(1)

    def sweep_pair(self, order: IntArray | None = None) -> float:
        """Sweep forward and backward over the costs as they are; return the bound without the limits' part.

        Nodes are visited in their order, or in one that is given.
        """
        self._sweep(True, order)
        return self._sweep(False, order)

    def _sweep(self, forward: bool, order: IntArray | None = None) -> float:
        order = self._order if order is None else order
        rank = self._order if order is self._order else np.argsort(order)
        return sweep(
            self.flat.graph,
            self.unary,
            self.tables,
            self.messages,
            order,
            rank,
            forward,
            self.choices,
            self._beliefs,
            self._share,
        )

    def _view(self) -> tuple[Graph, Usage, FloatArray, FloatArray, FloatArray, FloatArray, IntArray, bool]:
        """Return what :mod:`formulations.solvers.prices.dual_model` sees of the last sweep."""
        flat = self.flat
        return flat.graph, flat.usage, self.tables, self.messages, self._beliefs, self._share, self._order, False

    def _candidate_rows(self, temperature: float) -> IntArray:
        """Block maxima over time near their limit, and rows with a price; at most a few hundred."""
        usage = soft_usage(*self._view(), temperature)
        load = usage / np.maximum(self.flat.usage.limit, 1.0)
        peaks = block_peaks(load)
        peaks = peaks[load[peaks] > ASCENT_NEAR_LIMIT]
        priced = np.flatnonzero(self.prices > 0)
        if len(priced) > ROWS:
            priced = priced[np.argsort(-self.prices[priced] * self.flat.usage.limit[priced])[:ROWS]]
        fresh = np.setdiff1d(peaks, priced)
        if len(fresh) > ROWS:
            fresh = fresh[np.argsort(-load[fresh])[:ROWS]]
        return np.union1d(priced, fresh).astype(np.int64)
