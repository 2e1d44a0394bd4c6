"""Isolated nodes share nothing but memory: a multiple-choice knapsack with one capacity per row.

What single moves leave there are exchanges: a node takes a cheaper strategy that needs more memory than is
left, and others make room for less than it gains. As in the greedy algorithm along the hull of each class
(Kellerer, Pferschy, Pisinger: Knapsack Problems, 2004, section 11.2), room is made at the least cost per unit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from formulations.encodings.flat import FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.tunables import EXCHANGE_LISTS

EXCHANGE_RELIEFS = 16
"""Nodes that make room for one that takes it."""

_NEVER = 1e300
"""Not tunable: above any cost."""


class RowIndex(NamedTuple):
    """Which isolated nodes may use a row: one list for every ``length`` rows in a row.

    The nodes that use any of rows ``k * length`` to ``(k + 1) * length`` are ``node[start[k]:start[k + 1]]``,
    ascending.
    """

    length: int
    start: IntArray
    node: IntArray


def isolated_nodes(graph: Graph, usage: Usage) -> IntArray:
    """Return the nodes without factors that have a choice and use memory, ascending."""
    alone = (np.diff(graph.incident_start) == 0) & (graph.sizes > 1) & (np.diff(usage.node_start) > 0)
    return np.flatnonzero(alone).astype(np.int64)


def index_rows(usage: Usage, isolated: IntArray) -> RowIndex:
    """Return which of some nodes may use which row, in at most a few hundred lists."""
    length = -(-max(1, len(usage.limit)) // EXCHANGE_LISTS)
    lists: list[set[int]] = [set() for _ in range(0, max(1, len(usage.limit)), length)]
    for i in isolated.tolist():
        for q in range(int(usage.node_start[i]), int(usage.node_start[i + 1])):
            for k in range(int(usage.low[q]) // length, -(-int(usage.high[q]) // length)):
                lists[k].add(i)
    nodes = [sorted(own) for own in lists]
    start = np.concatenate([[0], np.cumsum([len(own) for own in nodes])]).astype(np.int64)
    return RowIndex(length, start, np.array([i for own in nodes for i in own], dtype=np.int64))


@compiled
def users_of(usage: Usage, index: RowIndex, row: int) -> IntArray:
    """Return the indexed nodes that use ``row``, ascending."""
    block = row // index.length
    found = np.empty(index.start[block + 1] - index.start[block], np.int64)
    count = 0
    for k in range(index.start[block], index.start[block + 1]):
        i = index.node[k]
        for q in range(usage.node_start[i], usage.node_start[i + 1]):
            if usage.low[q] <= row < usage.high[q]:
                found[count] = i
                count += 1
                break
    return found[:count]


@compiled
def move_alone(usage: Usage, choices: IntArray, node: int, strategy: int, usage_now: FloatArray) -> None:
    """Change an isolated node's choice, and the usage of its rows, whether that fits or not."""
    for q in range(usage.node_start[node], usage.node_start[node + 1]):
        start = usage.amount_start[q]
        extra = usage.amount[start + strategy] - usage.amount[start + choices[node]]
        if extra != 0.0:
            for t in range(usage.low[q], usage.high[q]):
                usage_now[t] += extra
    choices[node] = strategy


@compiled
def _freed(usage: Usage, node: int, present: int, strategy: int, row: int) -> float:
    """Return how much of ``row`` another strategy frees, 0 where it uses more at any time."""
    freed = 0.0
    for q in range(usage.node_start[node], usage.node_start[node + 1]):
        start = usage.amount_start[q]
        less = usage.amount[start + present] - usage.amount[start + strategy]
        if less < 0.0:
            return 0.0
        if usage.low[q] <= row < usage.high[q]:
            freed += less
    return freed


@compiled
def _cheapest_relief(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    choices: IntArray,
    index: RowIndex,
    row: int,
    need: float,
    most: float,
) -> tuple[int, int]:
    """Return the node and strategy that free ``row`` at the least cost per unit and below ``most`` in all, or -1."""
    best, to, least = -1, 0, _NEVER
    for i in users_of(usage, index, row):
        costs = graph.offset[i]
        for s in range(graph.sizes[i]):
            price = unary[costs + s] - unary[costs + choices[i]]
            if price < most and s != choices[i]:
                freed = _freed(usage, i, choices[i], s, row)
                if freed > 0.0 and price / min(freed, need) < least:
                    best, to, least = i, s, price / min(freed, need)
    return best, to


@compiled
def _fullest_row(usage: Usage, node: int, usage_now: FloatArray) -> int:
    """Return the row of an isolated node that is furthest over its limit, or -1."""
    row, worst = -1, 0.0
    for q in range(usage.node_start[node], usage.node_start[node + 1]):
        for t in range(usage.low[q], usage.high[q]):
            if usage_now[t] - usage.limit[t] > worst:
                row, worst = t, usage_now[t] - usage.limit[t]
    return row


@compiled
def exchange(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    choices: IntArray,
    takers: IntArray,
    index: RowIndex,
    usage_now: FloatArray,
    tolerance: float,
) -> float:
    """Let some isolated nodes in turn take cheaper strategies, all others making room; return the gain.

    Parameters
    ----------
    graph, usage, unary
        A flat problem without prices.
    choices
        Any assignment within the limits; stays so, and never costs more. Changed in place.
    takers
        Isolated nodes that may take.
    index
        Isolated nodes that may make room.
    usage_now
        Usage of every row, shape ``(rows,)``; changed in place.
    tolerance
        Least gain of an exchange, in cost.
    """
    moved = np.empty(EXCHANGE_RELIEFS + 1, np.int64)
    before = np.empty(EXCHANGE_RELIEFS + 1, np.int64)
    total = 0.0
    for i in takers:
        for s in range(graph.sizes[i]):
            left = unary[graph.offset[i] + choices[i]] - unary[graph.offset[i] + s]
            if left <= tolerance:
                continue
            moved[0], before[0], count = i, choices[i], 1
            move_alone(usage, choices, i, s, usage_now)
            row = _fullest_row(usage, i, usage_now)
            while row >= 0 and count <= EXCHANGE_RELIEFS:
                need = usage_now[row] - usage.limit[row]
                # This may be a part of the taker's own way back.
                other, to = _cheapest_relief(graph, usage, unary, choices, index, row, need, left - tolerance)
                if other < 0:
                    break
                left -= unary[graph.offset[other] + to] - unary[graph.offset[other] + choices[other]]
                moved[count], before[count] = other, choices[other]
                count += 1
                move_alone(usage, choices, other, to, usage_now)
                row = _fullest_row(usage, i, usage_now)
            if row < 0 and left > tolerance:
                total += left
            else:
                for k in range(count - 1, -1, -1):
                    move_alone(usage, choices, moved[k], before[k], usage_now)
    return total
