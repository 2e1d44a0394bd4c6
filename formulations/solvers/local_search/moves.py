"""Compiled moves over a flat problem: conditional costs, usage of rows, and one-node changes under limits.

``unary`` and ``tables`` are costs, possibly with memory prices added; ``choices`` and ``usage_now`` are
changed in place. A move is allowed when no row that it makes fuller ends above its limit.
"""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray

_NEVER = 1e300
"""Not tunable: above any cost."""


@compiled
def entry_without(graph: Graph, factor: int, axis: int, choices: IntArray) -> int:
    """Return the place in a factor's table of the present choices with node ``axis`` set to strategy 0."""
    place = 0
    for k in range(graph.arity[factor]):
        if k != axis:
            place += graph.stride[factor, k] * choices[graph.scope[factor, k]]
    return place


@compiled
def conditional_costs(
    graph: Graph, unary: FloatArray, tables: FloatArray, choices: IntArray, node: int, out: FloatArray
) -> None:
    """Write what each strategy of ``node`` costs, given the choices of all other nodes."""
    size = graph.sizes[node]
    start = graph.offset[node]
    for s in range(size):
        out[s] = unary[start + s]
    for a in range(graph.incident_start[node], graph.incident_start[node + 1]):
        f, axis = graph.incident_factor[a], graph.incident_axis[a]
        place = graph.table_start[f] + entry_without(graph, f, axis, choices)
        step = graph.stride[f, axis]
        for s in range(size):
            out[s] += tables[place + s * step]


@compiled
def total_cost(graph: Graph, unary: FloatArray, tables: FloatArray, choices: IntArray) -> float:
    """Return the cost of an assignment in float64."""
    total = 0.0
    for i in range(len(graph.sizes)):
        total += unary[graph.offset[i] + choices[i]]
    for f in range(len(graph.arity)):
        total += tables[graph.table_start[f] + entry_without(graph, f, -1, choices)]
    return total


@compiled
def usage_of(graph: Graph, usage: Usage, choices: IntArray) -> FloatArray:
    """Return the usage of every row, shape ``(rows,)``; exact integers."""
    rows = len(usage.limit)
    change = np.zeros(rows + 1)
    for i in range(len(graph.sizes)):
        for q in range(usage.node_start[i], usage.node_start[i + 1]):
            amount = usage.amount[usage.amount_start[q] + choices[i]]
            change[usage.low[q]] += amount
            change[usage.high[q]] -= amount
    for f in range(len(graph.arity)):
        if usage.factor_start[f] < usage.factor_start[f + 1]:
            place = entry_without(graph, f, -1, choices)
            for q in range(usage.factor_start[f], usage.factor_start[f + 1]):
                amount = usage.amount[usage.amount_start[q] + place]
                change[usage.low[q]] += amount
                change[usage.high[q]] -= amount
    running = 0.0
    for t in range(rows):
        running += change[t]
        change[t] = running
    return change[:rows]


@compiled
def change_rows(
    graph: Graph, usage: Usage, node: int, before: IntArray, after: IntArray, change: FloatArray, span: IntArray
) -> None:
    """Add what moving ``node`` changes to the difference array ``change``; widen ``span`` to the rows touched.

    Where several nodes move at once, a factor is counted with the first moved node of its scope.
    """
    old, new = before[node], after[node]
    for q in range(usage.node_start[node], usage.node_start[node + 1]):
        amount = usage.amount_start[q]
        extra = usage.amount[amount + new] - usage.amount[amount + old]
        if extra != 0.0:
            change[usage.low[q]] += extra
            change[usage.high[q]] -= extra
            span[0] = min(span[0], usage.low[q])
            span[1] = max(span[1], usage.high[q])
    for a in range(graph.incident_start[node], graph.incident_start[node + 1]):
        f = graph.incident_factor[a]
        if usage.factor_start[f] == usage.factor_start[f + 1]:
            continue
        counted = False
        for k in range(graph.incident_axis[a]):
            other = graph.scope[f, k]
            if before[other] != after[other]:
                counted = True
        if counted:
            continue
        place_old = entry_without(graph, f, -1, before)
        place_new = entry_without(graph, f, -1, after)
        for q in range(usage.factor_start[f], usage.factor_start[f + 1]):
            amount = usage.amount_start[q]
            extra = usage.amount[amount + place_new] - usage.amount[amount + place_old]
            if extra != 0.0:
                change[usage.low[q]] += extra
                change[usage.high[q]] -= extra
                span[0] = min(span[0], usage.low[q])
                span[1] = max(span[1], usage.high[q])


@compiled
def try_move(
    graph: Graph,
    usage: Usage,
    nodes: IntArray,
    count: int,
    choices: IntArray,
    proposal: IntArray,
    usage_now: FloatArray,
    change: FloatArray,
) -> bool:
    """Move ``nodes[:count]`` to ``proposal`` if memory allows; ``proposal`` equals ``choices`` elsewhere and after.

    ``change`` is scratch of zeros, shape ``(rows + 1,)``, and is zero again afterwards.
    """
    rows = len(usage_now)
    span = np.array([rows, 0])
    for z in range(count):
        if choices[nodes[z]] != proposal[nodes[z]]:
            change_rows(graph, usage, nodes[z], choices, proposal, change, span)
    allowed = True
    running = 0.0
    for t in range(span[0], span[1]):
        running += change[t]
        if running > 0.0 and usage_now[t] + running > usage.limit[t]:
            allowed = False
            break
    if allowed:
        running = 0.0
        for t in range(span[0], span[1]):
            running += change[t]
            usage_now[t] += running
    for t in range(span[0], min(span[1], rows) + 1):
        change[t] = 0.0
    for z in range(count):
        if allowed:
            choices[nodes[z]] = proposal[nodes[z]]
        else:
            proposal[nodes[z]] = choices[nodes[z]]
    return allowed


@compiled
def improve_nodes(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    tables: FloatArray,
    choices: IntArray,
    usage_now: FloatArray,
    rounds: int,
    tolerance: float,
) -> int:
    """Move single nodes to their cheapest allowed strategy until nothing improves; return the number of moves."""
    widest = 1
    for i in range(len(graph.sizes)):
        widest = max(widest, graph.sizes[i])
    costs = np.empty(widest)
    change = np.zeros(len(usage_now) + 1)
    proposal = choices.copy()
    single = np.empty(1, np.int64)
    moves = 0
    dirty = np.ones(len(graph.sizes), np.bool_)
    for r in range(rounds):
        moved = 0
        for i in range(len(graph.sizes)):
            # A node whose neighbourhood stands still can gain only through memory that others freed.
            if graph.sizes[i] == 1 or (r % 3 != 0 and not dirty[i]):
                continue
            dirty[i] = False
            conditional_costs(graph, unary, tables, choices, i, costs)
            single[0] = i
            while True:
                best = choices[i]
                for s in range(graph.sizes[i]):
                    if costs[s] < costs[best] - tolerance:
                        best = s
                if best == choices[i]:
                    break
                proposal[i] = best
                if try_move(graph, usage, single, 1, choices, proposal, usage_now, change):
                    moved += 1
                    for a in range(graph.incident_start[i], graph.incident_start[i + 1]):
                        f = graph.incident_factor[a]
                        for k in range(graph.arity[f]):
                            dirty[graph.scope[f, k]] = True
                    break
                costs[best] = _NEVER
        moves += moved
        if moved == 0 and r % 3 == 0:
            break
    return moves


@compiled
def settle(
    graph: Graph, unary: FloatArray, tables: FloatArray, choices: IntArray, order: IntArray, rounds: int
) -> None:
    """Move each node to its cheapest strategy given the others, memory ignored, until nothing moves."""
    widest = 1
    for i in range(len(graph.sizes)):
        widest = max(widest, graph.sizes[i])
    costs = np.empty(widest)
    for _ in range(rounds):
        moved = 0
        for i in order:
            conditional_costs(graph, unary, tables, choices, i, costs)
            best = choices[i]
            for s in range(graph.sizes[i]):
                if costs[s] < costs[best]:
                    best = s
            if best != choices[i]:
                choices[i] = best
                moved += 1
        if moved == 0:
            break


@compiled
def conflicts(graph: Graph, tables: FloatArray, penalty: float, choices: IntArray) -> int:
    """Return the number of factors at a forbidden combination (an entry of ``penalty``)."""
    count = 0
    for f in range(len(graph.arity)):
        if tables[graph.table_start[f] + entry_without(graph, f, -1, choices)] >= penalty:
            count += 1
    return count


@compiled
def decode_in_order(
    graph: Graph,
    unary: FloatArray,
    tables: FloatArray,
    messages: FloatArray,
    order: IntArray,
    decided: BoolArray,
    choices: IntArray,
) -> None:
    """Decide the nodes of ``order`` one after another; messages stand in for factors with undecided nodes."""
    widest = 1
    for i in range(len(graph.sizes)):
        widest = max(widest, graph.sizes[i])
    costs = np.empty(widest)
    for i in order:
        size = graph.sizes[i]
        for s in range(size):
            costs[s] = unary[graph.offset[i] + s]
        for a in range(graph.incident_start[i], graph.incident_start[i + 1]):
            f, axis = graph.incident_factor[a], graph.incident_axis[a]
            complete = True
            for k in range(graph.arity[f]):
                if k != axis and not decided[graph.scope[f, k]]:
                    complete = False
            if complete:
                place = graph.table_start[f] + entry_without(graph, f, axis, choices)
                for s in range(size):
                    costs[s] += tables[place + s * graph.stride[f, axis]]
            else:
                start = graph.message_start[f, axis]
                for s in range(size):
                    costs[s] += messages[start + s]
        best = 0
        for s in range(1, size):
            if costs[s] < costs[best]:
                best = s
        choices[i] = best
        decided[i] = True
