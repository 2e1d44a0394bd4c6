r"""Heat-bath moves (Geman and Geman 1984): nodes drawn anew, one after another, given all others, within the limits.

At temperature :math:`T` a node takes strategy ``s`` with a probability in proportion to :math:`\exp(-F(s) / T)`, where
its field ``F`` is what each of its strategies costs given the choices of all others. Fields are kept up to date, so
that a draw that changes nothing costs one pass over a node's strategies, whatever the node's degree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.flat import FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.moves import entry_without, try_move

HEAT_BATH_DRAWS = 3
"""Draws of a strategy before a node stays where it is."""

_FAR = 30.0
"""Not tunable: temperatures from which on the exponential is negligible."""


@compiled
def mirrored(graph: Graph, tables: FloatArray) -> NDArray[np.float32]:
    """Return transposed tables of factors of two nodes, laid out as ``tables``; single precision saves memory."""
    mirror = np.zeros(len(tables), np.float32)
    for f in range(len(graph.arity)):
        if graph.arity[f] == 2:
            rows, columns = graph.sizes[graph.scope[f, 0]], graph.sizes[graph.scope[f, 1]]
            start = graph.table_start[f]
            for s in range(rows):
                for t in range(columns):
                    mirror[start + t * rows + s] = tables[start + s * columns + t]
    return mirror


@compiled
def held_over_time(graph: Graph, usage: Usage) -> FloatArray:
    """Return what every strategy holds by itself, summed over all rows; laid out as ``unary``."""
    held = np.zeros(graph.offset[len(graph.sizes)])
    for i in range(len(graph.sizes)):
        for q in range(usage.node_start[i], usage.node_start[i + 1]):
            for s in range(graph.sizes[i]):
                amount = usage.amount[usage.amount_start[q] + s]
                held[graph.offset[i] + s] += (usage.high[q] - usage.low[q]) * amount
    return held


@compiled
def fields_of(
    graph: Graph, unary: FloatArray, tables: FloatArray, mirror: NDArray[np.float32], choices: IntArray
) -> FloatArray:
    """Return what every strategy costs given the choices of all other nodes, laid out as ``unary``.

    The first node of a pair sees the mirrored table here too: what :func:`update_fields` takes away later must be
    what was added, or rounding of the penalty for forbidden pairs would exceed all costs.
    """
    fields = unary.copy()
    for f in range(len(graph.arity)):
        start = graph.table_start[f]
        for k in range(graph.arity[f]):
            node = graph.scope[f, k]
            field = fields[graph.offset[node] : graph.offset[node + 1]]
            if graph.arity[f] == 2 and k == 0:
                column = mirror[start + choices[graph.scope[f, 1]] * len(field) :]
                for s in range(len(field)):
                    field[s] += np.float64(column[s])
            else:
                place, step = start + entry_without(graph, f, k, choices), graph.stride[f, k]
                for s in range(len(field)):
                    field[s] += tables[place + s * step]
    return fields


@compiled
def update_fields(
    graph: Graph,
    tables: FloatArray,
    mirror: NDArray[np.float32],
    choices: IntArray,
    node: int,
    before: int,
    fields: FloatArray,
) -> None:
    """Tell all neighbours of ``node``, which has left strategy ``before`` for the one in ``choices``."""
    after = choices[node]
    for a in range(graph.incident_start[node], graph.incident_start[node + 1]):
        f, axis = graph.incident_factor[a], graph.incident_axis[a]
        start = graph.table_start[f]
        if graph.arity[f] == 2:
            other = graph.scope[f, 1 - axis]
            width = graph.sizes[other]
            field = fields[graph.offset[other] : graph.offset[other] + width]
            if axis == 0:
                old, new = tables[start + before * width :], tables[start + after * width :]
                for t in range(width):
                    field[t] += new[t] - old[t]
            else:
                old_column, new_column = mirror[start + before * width :], mirror[start + after * width :]
                for t in range(width):
                    field[t] += np.float64(new_column[t]) - np.float64(old_column[t])
            continue
        back = (before - after) * graph.stride[f, axis]
        for k in range(graph.arity[f]):
            if k != axis:
                other, step = graph.scope[f, k], graph.stride[f, k]
                place, first = start + entry_without(graph, f, k, choices), graph.offset[other]
                for t in range(graph.sizes[other]):
                    fields[first + t] += tables[place + t * step] - tables[place + back + t * step]


@compiled
def heat_bath(
    graph: Graph,
    usage: Usage,
    tables: FloatArray,
    mirror: NDArray[np.float32],
    fields: FloatArray,
    choices: IntArray,
    usage_now: FloatArray,
    temperature: float,
    rounds: int,
) -> int:
    """Draw all nodes anew, in random order, so many rounds; see :func:`draw_nodes`."""
    moves = 0
    for _ in range(rounds):
        nodes = np.random.permutation(len(graph.sizes))  # noqa: NPY002
        moves += draw_nodes(graph, usage, tables, mirror, fields, choices, usage_now, temperature, nodes)
    return moves


@compiled
def draw_nodes(
    graph: Graph,
    usage: Usage,
    tables: FloatArray,
    mirror: NDArray[np.float32],
    fields: FloatArray,
    choices: IntArray,
    usage_now: FloatArray,
    temperature: float,
    nodes: IntArray,
) -> int:
    """Draw ``nodes`` anew, one after another; a draw that a limit refuses is repeated, a few times at most.

    Parameters
    ----------
    tables, mirror
        Costs of factors, and :func:`mirrored` of them.
    fields, choices, usage_now
        Present fields, strategies and usage of rows; changed in place.
    temperature
        In units of cost, above 0.

    Returns
    -------
    int
        Number of nodes moved.
    """
    widest = 1
    for i in range(len(graph.sizes)):
        widest = max(widest, graph.sizes[i])
    weight = np.empty(widest)
    proposal = choices.copy()
    single = np.empty(1, np.int64)
    change = np.zeros(len(usage_now) + 1)
    moves = 0
    for i in nodes:
        size = graph.sizes[i]
        if size == 1:
            continue
        total = _boltzmann(fields[graph.offset[i] : graph.offset[i] + size], temperature, weight)
        before = choices[i]
        single[0] = i
        for _ in range(HEAT_BATH_DRAWS):
            left = np.random.random() * total  # noqa: NPY002
            drawn = 0
            while drawn < size - 1 and left >= weight[drawn]:
                left -= weight[drawn]
                drawn += 1
            if drawn == before:
                break
            proposal[i] = drawn
            if try_move(graph, usage, single, 1, choices, proposal, usage_now, change):
                update_fields(graph, tables, mirror, choices, i, before, fields)
                moves += 1
                break
    return moves


@compiled
def _boltzmann(field: FloatArray, temperature: float, weight: FloatArray) -> float:
    """Write the weight of every strategy, 1 for the cheapest, and return their sum."""
    least = field.min()
    total = 0.0
    for s in range(len(field)):
        distance = (field[s] - least) / temperature
        weight[s] = np.exp(-distance) if distance < _FAR else 0.0
        total += weight[s]
    return total
