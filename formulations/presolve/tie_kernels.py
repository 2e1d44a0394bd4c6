"""Compiled loops of the first pass: arc consistency, ties, and tables rewritten for the nodes that lead.

Strategies and tables lie one after another in flat arrays; see :class:`Tables`. Costs must be such that no sum of
one entry per table reaches :data:`BLOCKED`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray

BLOCKED = 1 << 62
"""Not tunable: stands in tables for what is forbidden."""


class Tables(NamedTuple):
    """Costs of nodes and of pairs of nodes.

    Node ``i`` owns entries ``start[i]:start[i + 1]`` of ``cost``, none where it is no decision any more. Table
    ``e`` is ``entries[table_start[e]:table_start[e + 1]]``, row by row over the strategies of ``first[e]`` and
    ``second[e]``.
    """

    start: IntArray
    cost: IntArray
    first: IntArray
    second: IntArray
    table_start: IntArray
    entries: IntArray


@compiled
def drop_unsupported(tables: Tables, alive: BoolArray) -> int:
    """Drop strategies without support from ``alive``, in place; a worklist of tables (AC-3, Mackworth 1977).

    Returns
    -------
    int
        A node that has no strategy left, or -1.
    """
    nodes, count = len(tables.start) - 1, len(tables.first)
    blocking = np.zeros(count, np.bool_)
    degree = np.zeros(nodes + 1, np.int64)
    widest = 1
    for e in range(count):
        for place in range(tables.table_start[e], tables.table_start[e + 1]):
            if tables.entries[place] == BLOCKED:
                blocking[e] = True
                break
        if blocking[e]:
            degree[tables.first[e] + 1] += 1
            degree[tables.second[e] + 1] += 1
    for i in range(nodes):
        degree[i + 1] += degree[i]
        widest = max(widest, tables.start[i + 1] - tables.start[i])
    fill = degree[:nodes].copy()
    incident = np.empty(degree[nodes], np.int64)
    queue = np.empty(count + 1, np.int64)
    head, waiting = 0, 0
    queued = blocking.copy()
    for e in range(count):
        if blocking[e]:
            queue[waiting] = e
            waiting += 1
            for i in (tables.first[e], tables.second[e]):
                incident[fill[i]] = e
                fill[i] += 1
    row_kept, column_kept = np.empty(widest, np.bool_), np.empty(widest, np.bool_)
    while waiting:
        e = queue[head]
        head = (head + 1) % (count + 1)
        waiting -= 1
        queued[e] = False
        i, j = tables.first[e], tables.second[e]
        rows, columns = tables.start[i + 1] - tables.start[i], tables.start[j + 1] - tables.start[j]
        row_kept[:rows] = False
        column_kept[:columns] = False
        place = tables.table_start[e]
        for x in range(rows):
            if alive[tables.start[i] + x]:
                for y in range(columns):
                    if tables.entries[place + y] != BLOCKED and alive[tables.start[j] + y]:
                        row_kept[x] = True
                        column_kept[y] = True
            place += columns
        for node, size, kept in ((i, rows, row_kept), (j, columns, column_kept)):
            dropped, left = False, False
            for x in range(size):
                if alive[tables.start[node] + x]:
                    if kept[x]:
                        left = True
                    else:
                        alive[tables.start[node] + x] = False
                        dropped = True
            if not left:
                return int(node)
            if dropped:
                for k in range(degree[node], degree[node + 1]):
                    other = incident[k]
                    if other != e and not queued[other]:
                        queue[(head + waiting) % (count + 1)] = other
                        waiting += 1
                        queued[other] = True
    return -1


@compiled
def _partner(tables: Tables, alive: BoolArray, e: int, by_first: bool, s: int) -> int:
    """Return the only strategy of the other node that strategy ``s`` allows; -1 for none, -2 for several."""
    columns = tables.start[tables.second[e] + 1] - tables.start[tables.second[e]]
    other = tables.second[e] if by_first else tables.first[e]
    begin = tables.table_start[e] + (s * columns if by_first else s)
    step = 1 if by_first else columns
    found = -1
    for t in range(tables.start[other + 1] - tables.start[other]):
        if tables.entries[begin + t * step] != BLOCKED and alive[tables.start[other] + t]:
            if found >= 0:
                return -2
            found = t
    return found


@compiled
def _one_each(tables: Tables, alive: BoolArray, e: int, by_first: bool) -> bool:
    """Return whether each strategy of one node allows exactly one of the other."""
    node = tables.first[e] if by_first else tables.second[e]
    for s in range(tables.start[node + 1] - tables.start[node]):
        if alive[tables.start[node] + s] and _partner(tables, alive, e, by_first, s) < 0:
            return False
    return True


@compiled
def find_ties(tables: Tables, alive: BoolArray, pinned: BoolArray) -> tuple[IntArray, IntArray]:
    """Find the leader of every tied node; chains of leaders have no circle.

    Parameters
    ----------
    tables, alive
        Arc consistent.
    pinned
        Nodes that must not follow.

    Returns
    -------
    tuple
        Per node its leader, itself where it is not tied, and the table that ties it, else -1.
    """
    nodes = len(tables.start) - 1
    leader = np.arange(nodes)
    root = np.arange(nodes)
    table_of = np.full(nodes, -1, np.int64)
    for e in range(len(tables.first)):
        i, j = tables.first[e], tables.second[e]
        above, follower = -1, -1
        if leader[j] == j and not pinned[j] and _one_each(tables, alive, e, True):
            above, follower = i, j
        elif leader[i] == i and not pinned[i] and _one_each(tables, alive, e, False):
            above, follower = j, i
        if follower >= 0:
            top = above
            while root[top] != top:
                root[top] = root[root[top]]
                top = root[top]
            if top != follower:
                leader[follower] = above
                root[follower] = top
                table_of[follower] = e
    return leader, table_of


@compiled
def compose_ties(
    tables: Tables, alive: BoolArray, leader: IntArray, table_of: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Follow the ties up to who leads in the end.

    Returns
    -------
    tuple
        Per node the last leader, and where its entries begin in the third array: its strategy for every
        remaining strategy of that leader.
    """
    nodes = len(leader)
    top = np.full(nodes, -1, np.int64)
    left = np.zeros(nodes, np.int64)
    chain = np.empty(nodes, np.int64)
    for i in range(nodes):
        for place in range(tables.start[i], tables.start[i + 1]):
            left[i] += alive[place]
        if leader[i] == i:
            top[i] = i
    for i in range(nodes):
        length, node = 0, i
        while top[node] < 0:
            chain[length] = node
            length += 1
            node = leader[node]
        for k in range(length):
            top[chain[k]] = top[node]
    begin = np.zeros(nodes + 1, np.int64)
    for i in range(nodes):
        begin[i + 1] = begin[i] + left[top[i]]
    strategy = np.empty(begin[nodes], np.int64)
    written = np.zeros(nodes, np.bool_)
    for i in range(nodes):
        if leader[i] == i:
            place = begin[i]
            for s in range(tables.start[i + 1] - tables.start[i]):
                if alive[tables.start[i] + s]:
                    strategy[place] = s
                    place += 1
            written[i] = True
    for i in range(nodes):
        length, node = 0, i
        while not written[node]:
            chain[length] = node
            length += 1
            node = leader[node]
        for k in range(length - 1, -1, -1):
            node = chain[k]
            above, e = leader[node], table_of[node]
            by_first = tables.first[e] == above
            for x in range(left[top[node]]):
                strategy[begin[node] + x] = _partner(tables, alive, e, by_first, strategy[begin[above] + x])
            written[node] = True
    return top, begin, strategy


@compiled
def merged_costs(tables: Tables, top: IntArray, begin: IntArray, strategy: IntArray, start: IntArray) -> IntArray:
    """Add up the costs of all nodes per strategy of their leaders, which begin at ``start``."""
    cost = np.zeros(start[-1], np.int64)
    for i in range(len(top)):
        if tables.start[i] < tables.start[i + 1]:
            for x in range(begin[i + 1] - begin[i]):
                cost[start[top[i]] + x] += tables.cost[tables.start[i] + strategy[begin[i] + x]]
    return cost


@compiled
def add_tables(
    tables: Tables,
    top: IntArray,
    begin: IntArray,
    strategy: IntArray,
    start: IntArray,
    cost: IntArray,
    alive: BoolArray,
    place_of: IntArray,
    table_start: IntArray,
) -> IntArray:
    """Rewrite tables in the strategies of leaders; those of one leader, or of a fixed one, go into ``cost``.

    Parameters
    ----------
    tables
        Before.
    top, begin, strategy
        From :func:`compose_ties`.
    start, cost
        After; a leader with one strategy is fixed.
    alive
        Per strategy after: those that turn out to be forbidden are cleared.
    place_of, table_start
        Per table before its place among those after, or -1 where it goes into ``cost``, and where they begin.
    """
    entries = np.zeros(table_start[-1], np.int64)
    for e in range(len(tables.first)):
        i, j = tables.first[e], tables.second[e]
        columns = tables.start[j + 1] - tables.start[j]
        source = tables.table_start[e]
        high, low = begin[i + 1] - begin[i], begin[j + 1] - begin[j]
        if place_of[e] < 0:
            bearer = top[i] if low == 1 else top[j]
            for x in range(max(high, low)):
                s = strategy[begin[i] + (x if high > 1 else 0)]
                t = strategy[begin[j] + (x if low > 1 else 0)]
                value = tables.entries[source + s * columns + t]
                if value == BLOCKED:
                    alive[start[bearer] + x] = False
                else:
                    cost[start[bearer] + x] += value
            continue
        target = table_start[place_of[e]]
        down, across = (low, 1) if top[i] < top[j] else (1, high)
        for x in range(high):
            row = source + strategy[begin[i] + x] * columns
            for y in range(low):
                value = tables.entries[row + strategy[begin[j] + y]]
                place = target + x * down + y * across
                if value == BLOCKED or entries[place] == BLOCKED:
                    entries[place] = BLOCKED
                else:
                    entries[place] += value
    return entries


@compiled
def dissolve_separable(tables: Tables) -> BoolArray:
    """Move tables that are sums of two vectors into ``tables.cost``; return flags of the others."""
    kept = np.ones(len(tables.first), np.bool_)
    for e in range(len(tables.first)):
        i, j = tables.first[e], tables.second[e]
        rows, columns = tables.start[i + 1] - tables.start[i], tables.start[j + 1] - tables.start[j]
        table = tables.entries[tables.table_start[e] : tables.table_start[e + 1]]
        separable = True
        for x in range(rows):
            step = table[x * columns] - table[0]
            for y in range(columns):
                value = table[x * columns + y]
                if value == BLOCKED or value - table[y] != step:
                    separable = False
                    break
            if not separable:
                break
        if separable:
            kept[e] = False
            for x in range(rows):
                tables.cost[tables.start[i] + x] += table[x * columns]
            for y in range(columns):
                tables.cost[tables.start[j] + y] += table[y] - table[0]
    return kept


@compiled
def chain_strategies(
    begin: IntArray, strategy: IntArray, lead: IntArray, then_begin: IntArray, then: IntArray, new_begin: IntArray
) -> IntArray:
    """Compose what nodes do per strategy of ``lead`` with what that one does per strategy of its own leader."""
    result = np.empty(new_begin[-1], np.int64)
    for i in range(len(lead)):
        for x in range(new_begin[i + 1] - new_begin[i]):
            result[new_begin[i] + x] = strategy[begin[i] + then[then_begin[lead[i]] + x]]
    return result


@compiled
def merged_amounts(
    amount: IntArray, amount_start: IntArray, owner: IntArray, begin: IntArray, strategy: IntArray, target: IntArray
) -> IntArray:
    """Add up usage terms per strategy of the owners' leaders; term ``q`` goes to ``target[q]`` and the next places."""
    total = 0
    for q in range(len(owner)):
        total = max(total, target[q] + begin[owner[q] + 1] - begin[owner[q]])
    result = np.zeros(total, np.int64)
    for q in range(len(owner)):
        i = owner[q]
        for x in range(begin[i + 1] - begin[i]):
            result[target[q] + x] += amount[amount_start[q] + strategy[begin[i] + x]]
    return result
