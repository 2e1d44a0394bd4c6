"""Last resort for a first feasible assignment: weighted local search on violations alone.

Breakout local search (Morris 1993): violated rows and forbidden combinations carry weights; a step moves one
node that takes part in a violation to where the weighted violation is least (cost breaks ties), and where no
step helps, the weights of what is violated grow.
"""

from __future__ import annotations

import numpy as np

from formulations.flat import FloatArray, Graph, Usage
from formulations.problem import IntArray
from formulations.solvers.compiled import compiled
from formulations.solvers.moves import change_rows, conditional_costs, entry_without, usage_of

_NEVER = 1e300
_SAMPLED_NODES = 24


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
def _pick_violation(
    graph: Graph, usage: Usage, tables: FloatArray, penalty: float, choices: IntArray, usage_now: FloatArray
) -> tuple[int, int]:
    """Return a random violated row or conflicting factor (the other is -1), or (-1, -1)."""
    row, factor, seen = -1, -1, 0
    for t in range(len(usage_now)):
        if usage_now[t] > usage.limit[t]:
            seen += 1
            if np.random.random() * seen < 1.0:  # noqa: NPY002
                row = t
    for f in range(len(graph.arity)):
        if tables[graph.table_start[f] + entry_without(graph, f, -1, choices)] >= penalty:
            seen += 1
            if np.random.random() * seen < 1.0:  # noqa: NPY002
                row, factor = -1, f
    return row, factor


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
    count, rows = len(graph.sizes), len(usage.limit)
    widest = 1
    for i in range(count):
        widest = max(widest, graph.sizes[i])
    costs = np.empty(widest)
    change = np.zeros(rows + 1)
    usage_now = usage_of(graph, usage, choices)
    proposal = choices.copy()
    nodes = np.empty(count, np.int64)
    forbidden_until = np.zeros(graph.offset[count], np.int64)
    for step in range(steps):
        row, factor = _pick_violation(graph, usage, tables, penalty, choices, usage_now)
        if row < 0 and factor < 0:
            return True
        found = 0
        if factor >= 0:
            for k in range(graph.arity[factor]):
                nodes[found] = graph.scope[factor, k]
                found += 1
        else:
            for i in range(count):
                if graph.sizes[i] > 1 and _touches(graph, usage, i, row):
                    nodes[found] = i
                    found += 1
        best_node, best_strategy, best_change, best_cost = -1, -1, _NEVER, _NEVER
        for z in range(min(found, _SAMPLED_NODES)):
            pick = np.random.randint(z, found)  # noqa: NPY002
            nodes[z], nodes[pick] = nodes[pick], nodes[z]
            i = nodes[z]
            present = choices[i]
            conditional_costs(graph, unary, tables, choices, i, costs)
            conflict_now = _conflict_weight(graph, tables, penalty, factor_weights, choices, i, present)
            for s in range(graph.sizes[i]):
                if s == present or forbidden_until[graph.offset[i] + s] > step:
                    continue
                span = np.array([rows, 0])
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
            for t in range(rows):
                if usage_now[t] > usage.limit[t]:
                    row_weights[t] *= 1.3
            for f in range(len(graph.arity)):
                if tables[graph.table_start[f] + entry_without(graph, f, -1, choices)] >= penalty:
                    factor_weights[f] *= 1.3
        if best_node >= 0:
            forbidden_until[graph.offset[best_node] + choices[best_node]] = step + 2 + np.random.randint(5)  # noqa: NPY002
            choices[best_node] = best_strategy
            proposal[best_node] = best_strategy
            usage_now = usage_of(graph, usage, choices)
    row, factor = _pick_violation(graph, usage, tables, penalty, choices, usage_now)
    return row < 0 and factor < 0
