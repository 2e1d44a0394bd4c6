"""Costs of a flat problem with the price of usage added."""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray


class PricedCosts:
    """Working copies of costs, at prices per unit of usage that change often.

    Few rows have a price, and few tables use one of them; all others are left as they are.

    Attributes
    ----------
    unary, tables
        Costs at the last prices, laid out as those of the problem; the tables of the problem itself where no factor
        uses memory.
    """

    def __init__(self, flat: FlatProblem) -> None:
        self.unary = flat.unary.copy()
        self.tables = flat.tables_to_price()
        self._flat = flat
        self._is_priced: BoolArray = np.zeros(len(flat.graph.arity), dtype=np.bool_)

    def set(self, prices: FloatArray) -> None:
        """Write costs at ``prices``, one per row."""
        flat = self._flat
        self.unary[:] = flat.unary
        summed = _add_node_prices(flat.graph, flat.usage, prices, self.unary)
        _add_factor_prices(flat.graph, flat.usage, summed, flat.tables, self.tables, self._is_priced)


def priced_usage(flat: FlatProblem, prices: FloatArray) -> FloatArray:
    """Return what the usage of every node's strategies costs at prices, laid out as ``unary``."""
    priced: FloatArray = np.zeros(len(flat.unary))
    _add_node_prices(flat.graph, flat.usage, prices, priced)
    return priced


def expected_usage(flat: FlatProblem, prices: FloatArray, messages: FloatArray) -> FloatArray:
    """Return what the usage of every node's strategies costs at prices with that of its factors, laid out as ``unary``.

    The other nodes of a factor stand where prices and messages make it cheapest.
    """
    costs = PricedCosts(flat)
    costs.set(prices)
    priced: FloatArray = np.zeros(len(flat.unary))
    summed = _add_node_prices(flat.graph, flat.usage, prices, priced)
    _add_expected(flat.graph, flat.usage, summed, costs.tables, messages, flat.unary, 0.5 * flat.penalty, priced)
    return priced


@compiled
def _has_price(usage: Usage, summed: FloatArray, f: int) -> bool:
    """Whether any usage of a factor has a price."""
    for q in range(usage.factor_start[f], usage.factor_start[f + 1]):
        if summed[usage.high[q]] != summed[usage.low[q]]:
            return True
    return False


@compiled
def _add_expected(
    graph: Graph,
    usage: Usage,
    summed: FloatArray,
    tables: FloatArray,
    messages: FloatArray,
    unary: FloatArray,
    forbidden: float,
    priced: FloatArray,
) -> None:
    """Add the priced usage of factors of two nodes to the strategies of both."""
    for f in range(len(graph.arity)):
        first, end = usage.factor_start[f], usage.factor_start[f + 1]
        if graph.arity[f] != 2 or not _has_price(usage, summed, f):
            continue
        for axis in range(2):
            i, j = graph.scope[f, axis], graph.scope[f, 1 - axis]
            for s in range(graph.sizes[i]):
                best, cheapest = -1, np.inf
                for y in range(graph.sizes[j]):
                    if unary[graph.offset[j] + y] >= forbidden:
                        continue
                    at = s * graph.stride[f, axis] + y * graph.stride[f, 1 - axis]
                    cost = tables[graph.table_start[f] + at] - messages[graph.message_start[f, 1 - axis] + y]
                    if cost < cheapest:
                        best, cheapest = at, cost
                if best < 0:
                    continue
                for q in range(first, end):
                    price = summed[usage.high[q]] - summed[usage.low[q]]
                    priced[graph.offset[i] + s] += price * usage.amount[usage.amount_start[q] + best]


@compiled
def _add_node_prices(graph: Graph, usage: Usage, prices: FloatArray, unary_out: FloatArray) -> FloatArray:
    """Add the price of the usage of nodes; return prices summed up over the rows."""
    summed = np.zeros(len(prices) + 1)
    for t in range(len(prices)):
        summed[t + 1] = summed[t] + prices[t]
    for i in range(len(graph.sizes)):
        for q in range(usage.node_start[i], usage.node_start[i + 1]):
            price = summed[usage.high[q]] - summed[usage.low[q]]
            if price != 0.0:
                start, amount = graph.offset[i], usage.amount_start[q]
                for s in range(graph.sizes[i]):
                    unary_out[start + s] += price * usage.amount[amount + s]
    return summed


@compiled
def _add_factor_prices(
    graph: Graph, usage: Usage, summed: FloatArray, tables: FloatArray, tables_out: FloatArray, is_priced: BoolArray
) -> None:
    """Write the tables that have a price now, or had one before as ``is_priced`` says, which is brought up to date."""
    for f in range(len(graph.arity)):
        first, end = usage.factor_start[f], usage.factor_start[f + 1]
        has_price = _has_price(usage, summed, f)
        if not has_price and not is_priced[f]:
            continue
        is_priced[f] = has_price
        start, size = graph.table_start[f], graph.table_size[f]
        for s in range(size):
            tables_out[start + s] = tables[start + s]
        for q in range(first, end):
            price = summed[usage.high[q]] - summed[usage.low[q]]
            if price != 0.0:
                amount = usage.amount_start[q]
                for s in range(size):
                    tables_out[start + s] += price * usage.amount[amount + s]
