"""The bound of given prices and messages in compiled 64-bit integers, on the arrays of a flat problem.

The same number as :func:`formulations.solvers.prices.dual_bound.exact_bound` up to rounding, ten to thirty times
faster, where the arrays hold every cost exactly and a common denominator fits: floats are then integers, prices and
messages are rounded to multiples of a power of two, and no sum within a table can leave 64 bits. Totals are Python
integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.flat import FlatProblem, FloatArray, Graph, Usage
from formulations.encodings.flat_restriction import FORBIDDEN_SHARE
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray

_MOST_BITS = 40
"""Not tunable: bits of the fractions of prices and messages."""

_LEAST_BITS = 8
"""Not tunable: below that 64 bits are too few."""

_INT64_SAFE = 2.0**59
"""Not tunable: sums below it fit int64."""

_EXACT_IN_FLOAT = 2.0**52
"""Not tunable: integers below it are exact in doubles."""

_Scalar = TypeVar("_Scalar", bound=np.generic)
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class IntegerBound:
    """A bound and what each strategy costs beyond it.

    Parameters
    ----------
    scale
        All other numbers are in units of one part in ``scale`` of the cost quantum.
    rounding
        What rounding of prices and messages may have taken from the bound at most, in cost quanta.
    total
        No assignment within the limits costs less.
    contradiction
        Whether forbidden combinations leave no assignment at all; the other numbers then mean nothing.
    excess
        Per strategy (laid out as ``unary``): with it, none costs less than ``total + excess``.
    """

    scale: int
    rounding: float
    total: int
    contradiction: bool
    excess: IntArray

    @property
    def bound(self) -> int:
        """The bound in whole cost quanta; costs are integers, so that it may be rounded up."""
        return -((-self.total) // self.scale)

    def hopeless_from(self, objective: int) -> int:
        """Return the excess from which on a strategy belongs to no assignment cheaper than ``objective``."""
        return (objective - 1) * self.scale - self.total + 1


def holds_exact_costs(flat: FlatProblem) -> bool:
    """Return whether every cost, and every sum of costs, is exact in the arrays, and usage is not rounded."""
    # The penalty is a thousand times the sum of all magnitudes: beyond it, sums of floats could be rounded.
    return flat.penalty < 1e3 * _EXACT_IN_FLOAT and max(flat.rows.quantum, default=1) == 1


def integer_bound(flat: FlatProblem, prices: FloatArray, messages: FloatArray) -> IntegerBound | None:
    """Evaluate prices (negative ones count as zero) and messages of a problem that :func:`holds_exact_costs`.

    Returns
    -------
    IntegerBound or None
        None where 64 bits do not hold all numbers at a useful denominator.
    """
    prices = np.maximum(prices, 0.0)
    limit = FORBIDDEN_SHARE * flat.penalty
    bounded = _bounded(flat.graph, flat.unary, messages, limit, 0.01 * flat.penalty)
    largest = _largest_table(flat.graph, flat.usage, flat.unary, flat.tables, bounded, _summed(prices), limit)
    largest = max(largest, float(prices.sum()), 1.0)
    bits = min(_MOST_BITS, int(np.floor(np.log2(_INT64_SAFE / largest))))
    if bits < _LEAST_BITS:
        return None
    scale = 1 << bits
    whole_prices = np.rint(prices * scale).astype(np.int64)
    whole_messages = np.rint(bounded * scale).astype(np.int64)
    graph, usage = flat.graph, flat.usage
    lows, excess = _evaluate(graph, usage, flat.unary, flat.tables, whole_messages, _summed(whole_prices), limit, scale)
    limits = sum(int(price) * int(capacity) for price, capacity in zip(whole_prices, usage.limit, strict=True) if price)
    rounding = 0.5 / scale * float(len(messages) + usage.limit[prices > 0.0].sum())
    return IntegerBound(scale, rounding, sum(lows.tolist()) - limits, bool((lows == _NEVER).any()), excess)


def _summed(values: NDArray[_Scalar]) -> NDArray[_Scalar]:
    return np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])


@compiled
def _bounded(graph: Graph, unary: FloatArray, messages: FloatArray, limit: float, most: float) -> FloatArray:
    """Return messages that say the same with magnitudes of at most ``most``; beyond all costs they are of no use.

    Any messages are valid. A constant added to a message takes from its factor what it gives to its node, so that one
    that is too large is moved to where the middle one of the strategies left stands at zero: where strategies are
    forbidden, sweeps may carry multiples of the penalty round a cycle. What is forbidden at the node stays away from
    the factor's minimum.
    """
    bounded = np.full(len(messages), -most)
    widest = 1
    for i in range(len(graph.sizes)):
        widest = max(widest, graph.sizes[i])
    left = np.empty(widest)
    for f in range(len(graph.arity)):
        for k in range(graph.arity[f]):
            i, start, count, largest = graph.scope[f, k], graph.message_start[f, k], 0, 0.0
            for s in range(graph.sizes[i]):
                if unary[graph.offset[i] + s] < limit:
                    left[count] = messages[start + s]
                    largest = max(largest, abs(left[count]))
                    count += 1
            middle = np.median(left[:count]) if largest > most else 0.0
            for s in range(graph.sizes[i]):
                if unary[graph.offset[i] + s] < limit:
                    bounded[start + s] = min(most, max(-most, messages[start + s] - middle))
    return bounded


@compiled
def _largest_table(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    tables: FloatArray,
    messages: FloatArray,
    summed: FloatArray,
    limit: float,
) -> float:
    """Return an upper estimate of the largest magnitude of a priced node or factor with its messages."""
    nodes = len(graph.sizes)
    worst = 0.0
    for b in range(nodes + len(graph.arity)):
        if b < nodes:
            first, end, size = usage.node_start[b], usage.node_start[b + 1], graph.sizes[b]
        else:
            first, end = usage.factor_start[b - nodes], usage.factor_start[b - nodes + 1]
            size = graph.table_size[b - nodes]
        if b < nodes:
            total = _largest_allowed(unary[graph.offset[b] : graph.offset[b] + size], limit)
        else:
            start = graph.table_start[b - nodes]
            total = _largest_allowed(tables[start : start + size], limit)
        for q in range(first, end):
            price = summed[usage.high[q]] - summed[usage.low[q]]
            if price > 0.0:
                amounts = usage.amount[usage.amount_start[q] : usage.amount_start[q] + size]
                total += max(0.0, amounts.max()) * price
        if b < nodes:
            for a in range(graph.incident_start[b], graph.incident_start[b + 1]):
                start, most = graph.message_start[graph.incident_factor[a], graph.incident_axis[a]], 0.0
                for s in range(size):
                    most = max(most, abs(messages[start + s]))
                total += most
        else:
            for k in range(graph.arity[b - nodes]):
                start, most = graph.message_start[b - nodes, k], 0.0
                for s in range(graph.sizes[graph.scope[b - nodes, k]]):
                    most = max(most, abs(messages[start + s]))
                total += most
        worst = max(worst, 2.0 * total)
    return worst


@compiled
def _largest_allowed(values: FloatArray, limit: float) -> float:
    """Return the largest magnitude among what is not forbidden."""
    largest = 0.0
    for value in values:
        largest = max(largest, abs(value) if value < limit else 0.0)
    return largest


@compiled
def _evaluate(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    tables: FloatArray,
    messages: IntArray,
    summed: IntArray,
    limit: float,
    scale: int,
) -> tuple[IntArray, IntArray]:
    """Return the minimum of every node and factor, and per strategy what it costs beyond all minima."""
    nodes, factors = len(graph.sizes), len(graph.arity)
    lows = np.zeros(nodes + factors, np.int64)
    excess = np.zeros(len(unary), np.int64)
    widest, largest = 1, 1
    for i in range(nodes):
        widest = max(widest, graph.sizes[i])
    for f in range(factors):
        largest = max(largest, graph.table_size[f])
    values = np.empty(max(widest, largest), np.int64)
    for i in range(nodes):
        start, size = graph.offset[i], graph.sizes[i]
        for s in range(size):
            allowed = unary[start + s] < limit
            values[s] = np.int64(unary[start + s]) * scale if allowed else _NEVER
        _add_usage(usage, usage.node_start[i], usage.node_start[i + 1], summed, values, size)
        for a in range(graph.incident_start[i], graph.incident_start[i + 1]):
            message = graph.message_start[graph.incident_factor[a], graph.incident_axis[a]]
            for s in range(size):
                if values[s] != _NEVER:
                    values[s] += messages[message + s]
        low = _NEVER
        for s in range(size):
            low = min(low, values[s])
        lows[i] = low
        for s in range(size):
            excess[start + s] = values[s] - low if values[s] != _NEVER else _NEVER
    minima = np.empty(widest, np.int64)
    for f in range(factors):
        size = graph.table_size[f]
        table = tables[graph.table_start[f] : graph.table_start[f] + size]
        for e in range(size):
            values[e] = np.int64(table[e]) * scale if table[e] < limit else _NEVER
        _add_usage(usage, usage.factor_start[f], usage.factor_start[f + 1], summed, values, size)
        for k in range(graph.arity[f]):
            first, width = graph.message_start[f, k], graph.sizes[graph.scope[f, k]]
            _subtract_message(values[:size], messages[first : first + width], graph.stride[f, k])
        low = values[:size].min()
        lows[nodes + f] = low
        for k in range(graph.arity[f]):
            node = graph.scope[f, k]
            width, start = graph.sizes[node], graph.offset[node]
            _least_of_each(values[:size], graph.stride[f, k], minima[:width])
            for s in range(width):
                spare = _NEVER - excess[start + s]
                extra = minima[s] - low if minima[s] != _NEVER else _NEVER
                excess[start + s] += min(spare, extra)
    return lows, excess


@compiled
def _subtract_message(values: IntArray, message: IntArray, step: int) -> None:
    """Subtract a message from the allowed values of a table, in which its node's strategies are ``step`` apart."""
    width = len(message)
    for e in range(0, len(values), step * width):
        # Along contiguous entries, so that the inner loop becomes vector instructions.
        if step == 1:
            row = values[e : e + width]
            for s in range(width):
                row[s] = row[s] - message[s] if row[s] != _NEVER else _NEVER
            continue
        for s in range(width):
            block, moved = values[e + s * step : e + (s + 1) * step], message[s]
            for t in range(step):
                block[t] = block[t] - moved if block[t] != _NEVER else _NEVER


@compiled
def _least_of_each(values: IntArray, step: int, least: IntArray) -> None:
    """Write the least value of a table for each strategy of a node, whose strategies are ``step`` apart in it."""
    least[:] = _NEVER
    width = len(least)
    for e in range(0, len(values), step * width):
        if step == 1:
            row = values[e : e + width]
            for s in range(width):
                least[s] = min(least[s], row[s])
            continue
        for s in range(width):
            block, low = values[e + s * step : e + (s + 1) * step], least[s]
            for t in range(step):
                low = min(low, block[t])
            least[s] = low


@compiled
def _add_usage(usage: Usage, first: int, end: int, summed: IntArray, values: IntArray, size: int) -> None:
    """Add the price of usage to all values that are allowed."""
    for q in range(first, end):
        price = summed[usage.high[q]] - summed[usage.low[q]]
        if price != 0:
            for s in range(size):
                if values[s] != _NEVER:
                    values[s] += price * np.int64(usage.amount[usage.amount_start[q] + s])
