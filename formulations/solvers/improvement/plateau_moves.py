"""Random walk among assignments of equal cost: what stands still in one of them can often move in another."""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.moves import conditional_costs, try_move


@compiled
def wander(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    tables: FloatArray,
    choices: IntArray,
    usage_now: FloatArray,
    order: IntArray,
) -> int:
    """Move each node of ``order`` to another strategy of exactly the same cost, where the limits allow one.

    Of several such strategies the first after a random one is taken. ``choices`` and ``usage_now`` are changed in
    place; the number of moves is returned.
    """
    widest = 1
    for i in range(len(graph.sizes)):
        widest = max(widest, graph.sizes[i])
    costs = np.empty(widest)
    change = np.zeros(len(usage_now) + 1)
    proposal = choices.copy()
    single = np.empty(1, np.int64)
    moves = 0
    for i in order:
        size = graph.sizes[i]
        conditional_costs(graph, unary, tables, choices, i, costs)
        single[0] = i
        first = np.random.randint(size)  # noqa: NPY002
        for k in range(size):
            s = (first + k) % size
            if s != choices[i] and costs[s] == costs[choices[i]]:
                proposal[i] = s
                if try_move(graph, usage, single, 1, choices, proposal, usage_now, change):
                    moves += 1
                    break
    return moves
