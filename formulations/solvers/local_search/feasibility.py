"""Last resort for a first feasible assignment: weighted local search on violations alone.

Breakout local search (Morris 1993): violated rows and forbidden combinations carry weights; a step moves one
node that takes part in a violation to where the weighted violation is least (cost breaks ties), and where no
step helps, the weights of what is violated grow. A step costs as much as the rows and factors around the nodes
that it looks at: usage and conflicts are kept up to date, and nodes are drawn from an index by blocks of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from formulations.encodings.flat import FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.moves import change_rows, conditional_costs, entry_without, usage_of

SAMPLED_NODES = 24
"""Nodes of a violated row that one move chooses from."""

DRAWS_PER_NODE = 4
"""Draws for each of them."""

INDEXED_BLOCKS = 64
"""Blocks of rows, each with a list of the nodes that may use it."""

_NEVER = 1e300
"""Not tunable: above any cost."""


class _RowIndex(NamedTuple):
    """The nodes with a usage term over block ``b`` of rows: ``node[start[b]:start[b + 1]]``, with repetitions."""

    rows_per_block: int
    start: IntArray
    node: IntArray


class _Conflicts(NamedTuple):
    """The factors at a forbidden combination: ``factor[:number[0]]``, and the place of every factor in it or -1."""

    number: IntArray
    factor: IntArray
    place: IntArray


@compiled
def _touches(graph: Graph, usage: Usage, node: int, row: int) -> bool:
    """Return whether a node or one of its factors has a usage term over a row."""
    for q in range(usage.node_start[node], usage.node_start[node + 1]):
        if usage.low[q] <= row < usage.high[q]:
            return True
    for a in range(graph.incident_start[node], graph.incident_start[node + 1]):
        f = graph.incident_factor[a]
        for q in range(usage.factor_start[f], usage.factor_start[f + 1]):
            if usage.low[q] <= row < usage.high[q]:
                return True
    return False


@compiled
def _row_violation_change(
    usage: Usage, usage_now: FloatArray, weights: FloatArray, change: FloatArray, low: int, high: int
) -> float:
    """Return by how much the weighted excess over the limits changes under a difference array."""
    total, running = 0.0, 0.0
    for t in range(low, high):
        running += change[t]
        before = max(0.0, usage_now[t] - usage.limit[t])
        after = max(0.0, usage_now[t] + running - usage.limit[t])
        total += weights[t] * (after - before) / (usage.limit[t] + 1.0)
    return total


@compiled
def _conflict_weight(
    graph: Graph, tables: FloatArray, penalty: float, weights: FloatArray, choices: IntArray, node: int, s: int
) -> float:
    """Return the weight of forbidden combinations around a node if it took strategy ``s``."""
    total = 0.0
    for a in range(graph.incident_start[node], graph.incident_start[node + 1]):
        f, axis = graph.incident_factor[a], graph.incident_axis[a]
        place = graph.table_start[f] + entry_without(graph, f, axis, choices) + s * graph.stride[f, axis]
        if tables[place] >= penalty:
            total += weights[f]
    return total


@compiled
def _index_rows(graph: Graph, usage: Usage) -> _RowIndex:
    """Say which nodes may change each block of rows."""
    rows = len(usage.limit)
    length = max(1, -(-rows // INDEXED_BLOCKS))
    start = np.zeros(-(-rows // length) + 2, np.int64)
    node = np.empty(0, np.int64)
    nodes = len(graph.sizes)
    # Counted in the first pass, entered in the second; start[b + 1] moves from the first to the last of block b.
    for entering in range(2):
        for b in range(nodes + len(graph.arity)):
            if b < nodes:
                first, end, arity = usage.node_start[b], usage.node_start[b + 1], 1
            else:
                first, end = usage.factor_start[b - nodes], usage.factor_start[b - nodes + 1]
                arity = graph.arity[b - nodes]
            for q in range(first, end):
                for block in range(usage.low[q] // length, (usage.high[q] - 1) // length + 1):
                    for k in range(arity):
                        if entering == 0:
                            start[block + 2] += 1
                        else:
                            node[start[block + 1]] = b if b < nodes else graph.scope[b - nodes, k]
                            start[block + 1] += 1
        if entering == 0:
            start = np.cumsum(start)
            node = np.empty(start[-1], np.int64)
    return _RowIndex(length, start[:-1], node)


@compiled
def _draw_nodes(
    graph: Graph, usage: Usage, index: _RowIndex, row: int, stamp: int, stamps: IntArray, nodes: IntArray
) -> int:
    """Write a few different random nodes that may change a row; return how many. ``stamps`` marks who was drawn."""
    block = row // index.rows_per_block
    first, end = index.start[block], index.start[block + 1]
    found = 0
    for _ in range(min(end - first, SAMPLED_NODES) * DRAWS_PER_NODE):
        i = index.node[np.random.randint(first, end)]  # noqa: NPY002
        if stamps[i] != stamp and graph.sizes[i] > 1 and _touches(graph, usage, i, row):
            nodes[found] = i
            found += 1
            if found == SAMPLED_NODES:
                break
        stamps[i] = stamp
    return found


@compiled
def _update_conflict(
    graph: Graph, tables: FloatArray, penalty: float, choices: IntArray, conflicts: _Conflicts, f: int
) -> None:
    """Enter or remove a factor, as it is now."""
    forbidden = tables[graph.table_start[f] + entry_without(graph, f, -1, choices)] >= penalty
    place = conflicts.place[f]
    if forbidden and place < 0:
        conflicts.place[f] = conflicts.number[0]
        conflicts.factor[conflicts.number[0]] = f
        conflicts.number[0] += 1
    elif not forbidden and place >= 0:
        conflicts.number[0] -= 1
        last = conflicts.factor[conflicts.number[0]]
        conflicts.factor[place] = last
        conflicts.place[last] = place
        conflicts.place[f] = -1


@compiled
def _pick_violation(usage: Usage, usage_now: FloatArray, conflicts: _Conflicts) -> tuple[int, int]:
    """Return a random violated row or conflicting factor (the other is -1), or (-1, -1)."""
    over = 0
    for t in range(len(usage_now)):
        if usage_now[t] > usage.limit[t]:
            over += 1
    if over + conflicts.number[0] == 0:
        return -1, -1
    pick = np.random.randint(over + conflicts.number[0])  # noqa: NPY002
    if pick >= over:
        return -1, conflicts.factor[pick - over]
    for t in range(len(usage_now)):
        if usage_now[t] > usage.limit[t]:
            if pick == 0:
                return t, -1
            pick -= 1
    return -1, -1


@compiled
def _raise_weights(
    usage: Usage, usage_now: FloatArray, conflicts: _Conflicts, row_weights: FloatArray, factor_weights: FloatArray
) -> None:
    """Make what is violated now count for more."""
    for t in range(len(usage_now)):
        if usage_now[t] > usage.limit[t]:
            row_weights[t] += 1.0
    for z in range(conflicts.number[0]):
        factor_weights[conflicts.factor[z]] += 1.0


@compiled
def find_feasible(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    tables: FloatArray,
    penalty: float,
    choices: IntArray,
    row_weights: FloatArray,
    factor_weights: FloatArray,
    steps: int,
) -> bool:
    """Search for an assignment without violations, starting from and changing ``choices``.

    Parameters
    ----------
    row_weights, factor_weights
        Weights of violations, at first ones; changed in place, so that a search can be taken up again.

    Returns
    -------
    bool
        Whether ``choices`` is feasible now.
    """
    count, rows, factors = len(graph.sizes), len(usage.limit), len(graph.arity)
    widest = 1
    for i in range(count):
        widest = max(widest, graph.sizes[i])
    costs = np.empty(widest)
    change = np.zeros(rows + 1)
    span = np.empty(2, np.int64)
    usage_now = usage_of(graph, usage, choices)
    index = _index_rows(graph, usage)
    conflicts = _Conflicts(np.zeros(1, np.int64), np.empty(factors, np.int64), np.full(factors, -1, np.int64))
    for f in range(factors):
        _update_conflict(graph, tables, penalty, choices, conflicts, f)
    proposal = choices.copy()
    nodes = np.empty(max(3, SAMPLED_NODES), np.int64)
    stamps = np.full(count, -1, np.int64)
    forbidden_until = np.zeros(graph.offset[count], np.int64)
    for step in range(steps):
        row, factor = _pick_violation(usage, usage_now, conflicts)
        if row < 0 and factor < 0:
            return True
        found = 0
        if factor >= 0:
            for k in range(graph.arity[factor]):
                nodes[found] = graph.scope[factor, k]
                found += 1
        else:
            found = _draw_nodes(graph, usage, index, row, step, stamps, nodes)
        best_node, best_strategy, best_change, best_cost = -1, -1, _NEVER, _NEVER
        for z in range(found):
            i = nodes[z]
            present = choices[i]
            conditional_costs(graph, unary, tables, choices, i, costs)
            conflict_now = _conflict_weight(graph, tables, penalty, factor_weights, choices, i, present)
            for s in range(graph.sizes[i]):
                if s == present or forbidden_until[graph.offset[i] + s] > step:
                    continue
                span[0], span[1] = rows, 0
                proposal[i] = s
                change_rows(graph, usage, i, choices, proposal, change, span)
                worse = _row_violation_change(usage, usage_now, row_weights, change, span[0], span[1])
                for t in range(span[0], min(span[1], rows) + 1):
                    change[t] = 0.0
                conflict = _conflict_weight(graph, tables, penalty, factor_weights, choices, i, s)
                worse += conflict - conflict_now
                if worse < best_change or (worse == best_change and costs[s] < best_cost):
                    best_node, best_strategy, best_change, best_cost = i, s, worse, costs[s]
            proposal[i] = present
        if best_change >= 0.0:
            _raise_weights(usage, usage_now, conflicts, row_weights, factor_weights)
        if best_node >= 0:
            forbidden_until[graph.offset[best_node] + choices[best_node]] = step + 2 + np.random.randint(5)  # noqa: NPY002
            proposal[best_node] = best_strategy
            span[0], span[1] = rows, 0
            change_rows(graph, usage, best_node, choices, proposal, change, span)
            running = 0.0
            for t in range(span[0], min(span[1], rows) + 1):
                running += change[t]
                change[t] = 0.0
                if t < rows:
                    usage_now[t] += running
            choices[best_node] = best_strategy
            for a in range(graph.incident_start[best_node], graph.incident_start[best_node + 1]):
                _update_conflict(graph, tables, penalty, choices, conflicts, graph.incident_factor[a])
    row, factor = _pick_violation(usage, usage_now, conflicts)
    return row < 0 and factor < 0
