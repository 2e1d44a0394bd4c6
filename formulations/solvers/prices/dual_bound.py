"""The lower bound of given prices and messages, in exact integers.

Any prices that are not negative and any messages give a valid bound (weak duality; the formula stands in
:mod:`formulations.solvers.prices.trws`). So prices and messages, which a search found in floating point, are rounded
to multiples of a power of two and the bound is evaluated anew, from the problem itself, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.arc_consistency import FactorGroup
from formulations.encodings.elimination import CostTable, OutOfTimeError, TooWideError, minimise
from formulations.encodings.flat import FlatProblem, FloatArray, message_entries, restricted
from formulations.problem.strategy_problem import IntArray, StrategyProblem, UsageTerm
from formulations.solvers.prices.integer_bound import holds_exact_costs, integer_bound
from formulations.solvers.prices.tunables import LARGE_ENTRIES, NEGLIGIBLE, NEGLIGIBLE_OF_LARGE

_MOST_BITS = 40
"""Not tunable: bits of the fractions of prices and messages."""

_LEAST_BITS = 12
"""Not tunable: below that 64 bits are too few."""

_INT64_SAFE = 2.0**60
"""Not tunable: sums below it fit int64."""


def exact_bound(problem: StrategyProblem, flat: FlatProblem, prices: FloatArray, messages: FloatArray) -> int:
    """Return a lower bound on the cost of every feasible assignment, rounded up to an integer.

    Parameters
    ----------
    flat
        Of ``problem``, without contradiction.
    prices
        Cost per unit of flat usage, per row; negative ones count as zero.
    messages
        Laid out by ``flat.graph.message_start``.
    """
    if holds_exact_costs(flat):
        found = integer_bound(flat, prices, messages)
        share = NEGLIGIBLE if len(flat.tables) < LARGE_ENTRIES else NEGLIGIBLE_OF_LARGE
        notable = max(share * float(np.maximum(prices, 0.0) @ flat.usage.limit), 1.0)
        if found is not None and not found.contradiction and found.rounding < notable:
            return found.bound
    evaluation = _Evaluation(problem, flat, np.maximum(prices, 0.0), messages)
    total = evaluation.evaluate()
    return -((-total) // evaluation.scale)


def reparametrise(
    problem: StrategyProblem, flat: FlatProblem, prices: FloatArray, messages: FloatArray
) -> Reparametrised:
    """Return what :func:`exact_bound` adds up: how far every strategy and combination is from the bound."""
    return _Evaluation(problem, flat, np.maximum(prices, 0.0), messages).reparametrised()


def eliminated_bound(problem: StrategyProblem, flat: FlatProblem, prices: FloatArray, deadline: float) -> int | None:
    """Minimise the priced costs exactly by elimination: the best bound that these prices can give.

    Returns
    -------
    int or None
        The bound, or None where the graph is too wide, the time (of :func:`time.monotonic`) too short, or
        forbidden combinations leave nothing.
    """
    sizes = flat.graph.sizes.tolist()
    nothing = np.zeros(message_entries(flat.graph))
    evaluation = _Evaluation(problem, flat, np.maximum(prices, 0.0), nothing)
    try:
        found = minimise(sizes, evaluation.priced_tables(), deadline)
    except (TooWideError, OutOfTimeError):
        return None
    return None if found is None else -((evaluation.price_of_limits() - found[0]) // evaluation.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Reparametrised:
    """A problem as non-negative tables and a number: no assignment within the limits costs less than their sum.

    Parameters
    ----------
    scale
        All numbers are in units of one part in ``scale`` of the cost quantum.
    bound
        The number: the lower bound.
    nodes
        Per node what each supported strategy costs beyond the cheapest.
    tables
        Per factor group the same for each combination; meaningless where forbidden.
    allowed
        Per factor group which combinations are not forbidden; None where none is.
    """

    scale: int
    bound: int
    nodes: list[NDArray[Any]]
    tables: list[NDArray[Any]]
    allowed: list[NDArray[np.bool_] | None]


class _Evaluation:
    """Prices and messages as integers over a common denominator ``scale``."""

    def __init__(self, problem: StrategyProblem, flat: FlatProblem, prices: FloatArray, messages: FloatArray) -> None:
        self.problem = problem
        self.flat = flat
        self.bits, self.dtype = _representation(problem, flat, prices, messages)
        self.scale = 1 << self.bits
        rows = flat.rows
        quantum = np.array([float(q) for q in rows.quantum])
        per_unit = prices / quantum[rows.resource] if len(prices) else prices
        self.prices = [round(float(price) * self.scale) for price in per_unit]
        self.row_times: list[IntArray] = []
        self.summed_prices: list[list[int]] = []
        for r in range(len(problem.resources)):
            own = np.flatnonzero(rows.resource == r)
            self.row_times.append(rows.time[own])
            summed = [0]
            for t in own.tolist():
                summed.append(summed[-1] + self.prices[t])
            self.summed_prices.append(summed)
        rounded = np.rint(messages * self.scale)
        self.messages: NDArray[Any] = rounded.astype(np.int64) if self.dtype is np.int64 else _as_objects(rounded)

    def evaluate(self) -> int:
        """Return ``scale`` times the bound."""
        return self._reparametrise(None)[0]

    def reparametrised(self) -> Reparametrised:
        """Return all tables with the messages moved, and ``scale`` times the bound that they give."""
        kept: list[tuple[NDArray[Any], NDArray[np.bool_] | None]] = []
        bound, nodes = self._reparametrise(kept)
        return Reparametrised(self.scale, bound, nodes, [slack for slack, _ in kept], [flags for _, flags in kept])

    def _reparametrise(
        self, keep: list[tuple[NDArray[Any], NDArray[np.bool_] | None]] | None
    ) -> tuple[int, list[NDArray[Any]]]:
        """Move the messages; return the bound and the nodes' slacks, and keep the tables' slacks on request."""
        total = -self.price_of_limits()
        unary = self._priced_nodes()
        for g, group in enumerate(self.flat.groups):
            values, allowed = self._priced_group(group)
            for axis, i in enumerate(group.scope):
                start = self.flat.graph.message_start[g, axis]
                message = self.messages[start : start + len(self.flat.supported[i])]
                unary[i] = unary[i] + message
                values = values - message.reshape([-1 if k == axis else 1 for k in range(len(group.scope))])
            least = int((values if allowed is None else values[allowed]).min())
            total += least
            if keep is not None:
                slack = values - least
                keep.append((slack if allowed is None else np.where(allowed, slack, np.maximum(slack, 0)), allowed))
        lows = [int(values.min()) for values in unary]
        return total + sum(lows), [values - low for values, low in zip(unary, lows, strict=True)]

    def price_of_limits(self) -> int:
        """Return ``scale`` times what all limits together cost at the prices."""
        limits = [resource.limit or 0 for resource in self.problem.resources]
        return sum(price * limits[r] for price, r in zip(self.prices, self.flat.rows.resource.tolist(), strict=True))

    def priced_tables(self) -> list[CostTable]:
        """Return all tables, ``scale`` times cost plus price of usage, over supported strategies."""
        tables = [CostTable((i,), values) for i, values in enumerate(self._priced_nodes())]
        for group in self.flat.groups:
            values, allowed = self._priced_group(group)
            tables.append(CostTable(group.scope, values, None if allowed is None else ~allowed))
        return tables

    def _priced_nodes(self) -> list[NDArray[Any]]:
        unary = []
        for node, kept in zip(self.problem.nodes, self.flat.supported, strict=True):
            values = node.cost[kept].astype(self.dtype) * self.scale
            for term in node.usage:
                values = self._with_usage(values, term, term.amount[kept])
            unary.append(values)
        for factor in self.problem.factors:
            if len(factor.scope) == 1:
                i = factor.scope[0]
                kept = self.flat.supported[i]
                unary[i] = unary[i] + factor.cost[kept].astype(self.dtype) * self.scale
                for term in factor.usage:
                    unary[i] = self._with_usage(unary[i], term, term.amount[kept])
        return unary

    def _priced_group(self, group: FactorGroup) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """The table of a group over supported strategies, and which of its entries are allowed (None: all)."""
        kept = [self.flat.supported[i] for i in group.scope]
        values: NDArray[Any] = np.zeros(tuple(len(strategies) for strategies in kept), dtype=self.dtype)
        allowed: NDArray[np.bool_] | None = None
        for m, j in enumerate(group.members):
            factor = self.problem.factors[j]
            values = values + restricted(group.oriented(m, factor.cost), kept).astype(self.dtype) * self.scale
            for term in factor.usage:
                values = self._with_usage(values, term, restricted(group.oriented(m, term.amount), kept))
            if factor.forbidden is not None:
                flags = ~restricted(group.oriented(m, factor.forbidden), kept)
                allowed = flags if allowed is None else allowed & flags
        return values, allowed

    def _with_usage(self, values: NDArray[Any], term: UsageTerm, amount: IntArray) -> NDArray[Any]:
        times, summed = self.row_times[term.resource], self.summed_prices[term.resource]
        low, high = np.searchsorted(times, (term.start, term.end))
        price = summed[max(low, high)] - summed[low]
        return values + amount.astype(self.dtype) * price if price and amount.any() else values


def _representation(
    problem: StrategyProblem, flat: FlatProblem, prices: FloatArray, messages: FloatArray
) -> tuple[int, type[Any]]:
    """Choose the denominator's bits and a type in which no table of scaled values can overflow."""
    largest = _largest_table(problem, flat, prices)
    degree = np.diff(flat.graph.incident_start).max(initial=0) + 3
    largest += float(degree) * float(np.abs(messages).max(initial=0.0))
    bits = _MOST_BITS
    while bits >= _LEAST_BITS and largest * 2.0**bits >= _INT64_SAFE:
        bits -= 1
    positive = prices[prices > 1e-6 * prices.max(initial=0.0)]
    quantum = float(max(flat.rows.quantum, default=1))
    resolved = not len(positive) or float(positive.min()) / quantum * 2.0**bits >= 2.0**10
    if bits >= _LEAST_BITS and resolved:
        return bits, np.int64
    smallest = float(positive.min()) / quantum if len(positive) else 1.0
    return max(_MOST_BITS, 24 - int(np.floor(np.log2(smallest)))), np.object_


def _largest_table(problem: StrategyProblem, flat: FlatProblem, prices: FloatArray) -> float:
    """An upper estimate of the largest magnitude of a priced node or factor group, in cost units."""
    total_price = [float(prices[flat.rows.resource == r].sum()) / q for r, q in enumerate(flat.rows.quantum)]
    extent = np.zeros(len(problem.nodes))
    grouped = 0.0

    def magnitude(cost: IntArray, usage: tuple[UsageTerm, ...]) -> float:
        value = max(float(cost.max()), -float(cost.min()))
        return value + sum(total_price[term.resource] * float(term.amount.max()) for term in usage)

    for i, node in enumerate(problem.nodes):
        extent[i] += magnitude(node.cost, node.usage)
    for factor in problem.factors:
        if len(factor.scope) == 1:
            extent[factor.scope[0]] += magnitude(factor.cost, factor.usage)
    for group in flat.groups:
        members = (problem.factors[j] for j in group.members)
        grouped = max(grouped, sum(magnitude(factor.cost, factor.usage) for factor in members))
    return 2.0 * max(float(extent.max(initial=0.0)), grouped)


def _as_objects(values: FloatArray) -> NDArray[Any]:
    result = np.empty(len(values), dtype=np.object_)
    result[:] = [int(value) for value in values.tolist()]
    return result
