"""Greedy repair: from over the limits to under them, at the least cost per unit of memory freed."""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.moves import conditional_costs, entry_without, try_move

_NEVER = 1e300
"""Not tunable: above any cost."""


@compiled
def _row_usage_by_strategy(graph: Graph, usage: Usage, choices: IntArray, node: int, row: int, out: FloatArray) -> None:
    """Write what each strategy of ``node`` makes it and its factors use of ``row``."""
    size = graph.sizes[node]
    for s in range(size):
        out[s] = 0.0
    for q in range(usage.node_start[node], usage.node_start[node + 1]):
        if usage.low[q] <= row < usage.high[q]:
            for s in range(size):
                out[s] += usage.amount[usage.amount_start[q] + s]
    for a in range(graph.incident_start[node], graph.incident_start[node + 1]):
        f, axis = graph.incident_factor[a], graph.incident_axis[a]
        for q in range(usage.factor_start[f], usage.factor_start[f + 1]):
            if usage.low[q] <= row < usage.high[q]:
                place = usage.amount_start[q] + entry_without(graph, f, axis, choices)
                for s in range(size):
                    out[s] += usage.amount[place + s * graph.stride[f, axis]]


@compiled
def _cheapest_relief(
    graph: Graph,
    unary: FloatArray,
    tables: FloatArray,
    usage: Usage,
    choices: IntArray,
    node: int,
    row: int,
    need: float,
    costs: FloatArray,
    used: FloatArray,
    banned: IntArray,
) -> tuple[int, float]:
    """Return the strategy that frees ``row`` at the least cost per unit (and that rate), or -1."""
    _row_usage_by_strategy(graph, usage, choices, node, row, used)
    present = choices[node]
    best, rate = -1, _NEVER
    least = used[0]
    for s in range(graph.sizes[node]):
        least = min(least, used[s])
    if least == used[present]:
        return best, rate
    conditional_costs(graph, unary, tables, choices, node, costs)
    for s in range(graph.sizes[node]):
        freed = used[present] - used[s]
        if freed > 0.0 and banned[graph.offset[node] + s] == 0:
            r = (costs[s] - costs[present]) / min(freed, need)
            if r < rate:
                best, rate = s, r
    return best, rate


@compiled
def repair(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    tables: FloatArray,
    choices: IntArray,
    usage_now: FloatArray,
    most_rows: int,
) -> bool:
    """Bring usage under the limits: at the worst row, moves in order of cost per unit freed there.

    No move makes another row worse than its limit. Returns whether all rows are within their limits;
    where not, the moves made so far stay.
    """
    count = len(graph.sizes)
    widest = 1
    for i in range(count):
        widest = max(widest, graph.sizes[i])
    costs, used = np.empty(widest), np.empty(widest)
    banned = np.zeros(graph.offset[count], np.int64)
    change = np.zeros(len(usage_now) + 1)
    proposal = choices.copy()
    single = np.empty(1, np.int64)
    candidates = np.empty(count, np.int64)
    rates = np.empty(count)
    for _ in range(most_rows):
        row, worst = -1, 0.0
        for t in range(len(usage_now)):
            excess = (usage_now[t] - usage.limit[t]) / (usage.limit[t] + 1.0)
            if excess > worst:
                row, worst = t, excess
        if row < 0:
            return True
        found = 0
        for i in range(count):
            need = usage_now[row] - usage.limit[row]
            s, rate = _cheapest_relief(graph, unary, tables, usage, choices, i, row, need, costs, used, banned)
            if s >= 0:
                candidates[found] = i
                rates[found] = rate
                found += 1
        order = np.argsort(rates[:found])
        moved = 0
        for z in range(found):
            i = candidates[order[z]]
            later = min(found - 1, z + 1 + found // 20)
            while True:
                need = usage_now[row] - usage.limit[row]
                s, rate = _cheapest_relief(graph, unary, tables, usage, choices, i, row, need, costs, used, banned)
                # Others moved since the rates were taken: what became dear waits for the next round.
                if s < 0 or (moved > 0 and later > z and rate > 2.0 * max(0.0, rates[order[later]]) + 1e-30):
                    break
                proposal[i] = s
                single[0] = i
                if try_move(graph, usage, single, 1, choices, proposal, usage_now, change):
                    moved += 1
                    break
                banned[graph.offset[i] + s] = 1
            if usage_now[row] <= usage.limit[row]:
                break
        for i in range(count):
            for s in range(graph.offset[i], graph.offset[i + 1]):
                banned[s] = 0
        if moved == 0:
            return False
    return bool(np.all(usage_now <= usage.limit))
