r"""Sequential tree-reweighted message passing, a lower bound for factor costs without memory.

TRW-S (Kolmogorov 2006), in the form that extends to factors of three nodes, SRMP (Kolmogorov 2015, with
singleton separators). A message :math:`m_{f,i}(x_i)` moves cost from factor ``f`` to node ``i``, so that for
any messages at all

.. math:: \sum_i \min_s \Big(\theta_i(s) + \sum_{f \ni i} m_{f,i}(s)\Big)
          + \sum_f \min_x \Big(\theta_f(x) - \sum_{i \in f} m_{f,i}(x_i)\Big)

is a lower bound; a sweep never lowers it.
"""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FloatArray, Graph
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.moves import entry_without

_NEVER = 1e300
"""Not tunable: above any cost."""


@compiled
def collect_pair(graph: Graph, tables: FloatArray, messages: FloatArray, f: int, axis: int) -> None:
    """Set the message of a factor of two nodes to its min-marginal at ``axis``."""
    rows, columns = graph.sizes[graph.scope[f, 0]], graph.sizes[graph.scope[f, 1]]
    first = messages[graph.message_start[f, 0] : graph.message_start[f, 0] + rows]
    second = messages[graph.message_start[f, 1] : graph.message_start[f, 1] + columns]
    # Views of one row each: only then do the inner loops become vector instructions.
    place = graph.table_start[f]
    if axis == 1:
        second[:] = _NEVER
    for s in range(rows):
        row = tables[place : place + columns]
        place += columns
        if axis == 0:
            best = _NEVER
            for t in range(columns):
                best = min(best, row[t] - second[t])
            first[s] = best
        else:
            moved = first[s]
            for t in range(columns):
                second[t] = min(second[t], row[t] - moved)


@compiled
def collect_triple(graph: Graph, tables: FloatArray, messages: FloatArray, f: int, axis: int) -> None:
    """Set the message of a factor of three nodes to its min-marginal at ``axis``."""
    other, last = (1, 2) if axis == 0 else ((0, 2) if axis == 1 else (0, 1))
    table, target = graph.table_start[f], graph.message_start[f, axis]
    for s in range(graph.sizes[graph.scope[f, axis]]):
        best = _NEVER
        for t in range(graph.sizes[graph.scope[f, other]]):
            moved = messages[graph.message_start[f, other] + t]
            place = table + s * graph.stride[f, axis] + t * graph.stride[f, other]
            start, step = graph.message_start[f, last], graph.stride[f, last]
            for u in range(graph.sizes[graph.scope[f, last]]):
                best = min(best, tables[place + u * step] - moved - messages[start + u])
        messages[target + s] = best


@compiled
def _place_in_factor(graph: Graph, rank: IntArray, f: int, axis: int, forward: bool) -> tuple[bool, bool]:
    """Return whether a node is the first and whether it is the last of a factor in the present direction."""
    first, last = True, True
    own = rank[graph.scope[f, axis]]
    for k in range(graph.arity[f]):
        if k != axis:
            if (rank[graph.scope[f, k]] < own) == forward:
                first = False
            else:
                last = False
    return first, last


@compiled
def sweep(
    graph: Graph,
    unary: FloatArray,
    tables: FloatArray,
    messages: FloatArray,
    order: IntArray,
    rank: IntArray,
    forward: bool,
    choices: IntArray,
    beliefs: FloatArray,
    share: FloatArray,
) -> float:
    """Visit all nodes in ``order`` (or its reverse), collect from factors behind, hand on to factors ahead.

    Parameters
    ----------
    messages
        Changed in place; laid out by ``graph.message_start``.
    order, rank
        A permutation of the nodes and its inverse.
    choices
        Receives an assignment: each node at its best given those decided before it in the sweep.
    beliefs
        Receives the cost of every strategy as its node saw it, the smallest at 0; laid out as ``unary``.
    share
        Receives, per node, the part of its belief that it hands to each factor.

    Returns
    -------
    float
        The lower bound, up to rounding.
    """
    bound = 0.0
    widest = 1
    for i in range(len(graph.sizes)):
        widest = max(widest, graph.sizes[i])
    local = np.empty(widest)
    for r in range(len(order)):
        i = order[r] if forward else order[len(order) - 1 - r]
        size, start = graph.sizes[i], graph.offset[i]
        for s in range(size):
            beliefs[start + s] = unary[start + s]
            local[s] = unary[start + s]
        ahead, behind = 0, 0
        for a in range(graph.incident_start[i], graph.incident_start[i + 1]):
            f, axis = graph.incident_factor[a], graph.incident_axis[a]
            first, last = _place_in_factor(graph, rank, f, axis, forward)
            if not first:
                behind += 1
                if graph.arity[f] == 2:
                    collect_pair(graph, tables, messages, f, axis)
                else:
                    collect_triple(graph, tables, messages, f, axis)
            if not last:
                ahead += 1
            message = graph.message_start[f, axis]
            for s in range(size):
                beliefs[start + s] += messages[message + s]
            if last:
                place, step = graph.table_start[f] + entry_without(graph, f, axis, choices), graph.stride[f, axis]
                for s in range(size):
                    local[s] += tables[place + s * step]
            else:
                for s in range(size):
                    local[s] += messages[message + s]
        best, least = 0, beliefs[start]
        for s in range(size):
            if local[s] < local[best]:
                best = s
            least = min(least, beliefs[start + s])
        choices[i] = best
        bound += least
        for s in range(size):
            beliefs[start + s] -= least
        share[i] = 1.0 / max(1, ahead, behind)
        for a in range(graph.incident_start[i], graph.incident_start[i + 1]):
            f, axis = graph.incident_factor[a], graph.incident_axis[a]
            _, last = _place_in_factor(graph, rank, f, axis, forward)
            if not last:
                message = graph.message_start[f, axis]
                for s in range(size):
                    messages[message + s] -= share[i] * beliefs[start + s]
    return bound
