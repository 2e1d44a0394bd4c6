"""Large moves: random trees inside the graph, each solved exactly by dynamic programming.

A tree is grown from a random seed over factors of two nodes; a node joins where it touches the tree through
one factor only, so that, given all other choices, the tree's best choices are one pass up and one down.
Nodes of high degree are left out at random (or every tree would be a star around one of them).
"""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.moves import entry_without, try_move

HUB_DEGREE = 16
"""Degree from which on a node is a hub: random trees mostly leave it out, for all is near to all through it."""

_NEVER = 1e300
"""Not tunable: above any cost."""


@compiled
def _grow(graph: Graph, seed: int, most: int, member: IntArray, frozen: IntArray, tree: IntArray, via: IntArray) -> int:
    """Write the nodes of a random induced tree in order of joining; return their number.

    ``member[node]`` is its place in the tree plus one; ``via[z]`` the incidence through which the ``z``-th
    node sees its parent.
    """
    frontier = np.empty(4 * most + 64, np.int64)
    tree[0] = seed
    via[0] = -1
    member[seed] = 1
    size, waiting = 1, 0
    node = seed
    while True:
        for a in range(graph.incident_start[node], graph.incident_start[node + 1]):
            f = graph.incident_factor[a]
            if graph.arity[f] == 2 and waiting < len(frontier):
                other = graph.scope[f, 1 - graph.incident_axis[a]]
                if member[other] == 0 and frozen[other] == 0:
                    frontier[waiting] = other
                    waiting += 1
        joined = False
        while waiting > 0 and size < most and not joined:
            z = np.random.randint(waiting)  # noqa: NPY002
            node = frontier[z]
            waiting -= 1
            frontier[z] = frontier[waiting]
            if member[node] > 0:
                continue
            contacts, link, plain = 0, -1, True
            for a in range(graph.incident_start[node], graph.incident_start[node + 1]):
                f = graph.incident_factor[a]
                for k in range(graph.arity[f]):
                    if k != graph.incident_axis[a] and member[graph.scope[f, k]] > 0:
                        contacts += 1
                        link = a
                        plain = plain and graph.arity[f] == 2
            if contacts == 1 and plain:
                joined = True
                tree[size] = node
                via[size] = link
                size += 1
                member[node] = size
        if not joined:
            return size


@compiled
def _solve_tree(
    graph: Graph,
    unary: FloatArray,
    tables: FloatArray,
    choices: IntArray,
    proposal: IntArray,
    tree: IntArray,
    via: IntArray,
    size: int,
    member: IntArray,
    costs: FloatArray,
    width: int,
) -> float:
    """Write the tree's best choices to ``proposal`` and return what they gain over ``choices``."""
    before = 0.0
    for z in range(size):
        i = tree[z]
        row = z * width
        for s in range(graph.sizes[i]):
            costs[row + s] = unary[graph.offset[i] + s]
        for a in range(graph.incident_start[i], graph.incident_start[i + 1]):
            f, axis = graph.incident_factor[a], graph.incident_axis[a]
            inside = graph.arity[f] == 2 and member[graph.scope[f, 1 - axis]] > 0
            if not inside:
                place, step = graph.table_start[f] + entry_without(graph, f, axis, choices), graph.stride[f, axis]
                for s in range(graph.sizes[i]):
                    costs[row + s] += tables[place + s * step]
        before += costs[row + choices[i]]
        if z > 0:
            f = graph.incident_factor[via[z]]
            before += tables[graph.table_start[f] + entry_without(graph, f, -1, choices)]
    for z in range(size - 1, 0, -1):
        i = tree[z]
        f, axis = graph.incident_factor[via[z]], graph.incident_axis[via[z]]
        parent = graph.scope[f, 1 - axis]
        row, up = z * width, (member[parent] - 1) * width
        own, step = graph.stride[f, axis], graph.stride[f, 1 - axis]
        for p in range(graph.sizes[parent]):
            place = graph.table_start[f] + p * step
            best = _NEVER
            for s in range(graph.sizes[i]):
                best = min(best, costs[row + s] + tables[place + s * own])
            costs[up + p] += best
    after = _NEVER
    for s in range(graph.sizes[tree[0]]):
        if costs[s] < after:
            after = costs[s]
            proposal[tree[0]] = s
    for z in range(1, size):
        i = tree[z]
        f, axis = graph.incident_factor[via[z]], graph.incident_axis[via[z]]
        place = graph.table_start[f] + proposal[graph.scope[f, 1 - axis]] * graph.stride[f, 1 - axis]
        best = _NEVER
        for s in range(graph.sizes[i]):
            value = costs[z * width + s] + tables[place + s * graph.stride[f, axis]]
            if value < best:
                best = value
                proposal[i] = s
    return before - after


@compiled
def tree_search(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    tables: FloatArray,
    choices: IntArray,
    usage_now: FloatArray,
    work: int,
    smallest: int,
    largest: int,
    limited: bool,
    tolerance: float,
) -> float:
    """Solve random trees until ``work`` nodes have been visited; return the total gain.

    With ``limited``, a move must leave memory within its limits (and keeps ``usage_now`` up to date);
    without, every gain is taken and ``usage_now`` is not touched.
    """
    count = len(graph.sizes)
    largest = max(1, min(largest, count))
    smallest = min(smallest, largest)
    width = 1
    for i in range(count):
        width = max(width, graph.sizes[i])
    member, frozen = np.zeros(count, np.int64), np.zeros(count, np.int64)
    tree, via = np.empty(largest, np.int64), np.empty(largest, np.int64)
    costs = np.empty(largest * width)
    change = np.zeros(len(usage_now) + 1)
    proposal = choices.copy()
    gained = 0.0
    visited = 0
    moves = 0
    while visited < work:
        if moves % 4 == 0:
            share = max(0.0, 1.3 * np.random.random() - 0.3)  # noqa: NPY002
            for i in range(count):
                degree = graph.incident_start[i + 1] - graph.incident_start[i]
                hub = degree >= HUB_DEGREE and np.random.random() < share * min(1.0, degree / 64)  # noqa: NPY002
                frozen[i] = 1 if hub else 0
        moves += 1
        spread = np.log(largest / smallest)
        most = int(smallest * np.exp(spread * np.random.random()))  # noqa: NPY002
        seed = np.random.randint(count)  # noqa: NPY002
        size = _grow(graph, seed, most, member, frozen, tree, via)
        visited += size + 5
        gain = _solve_tree(graph, unary, tables, choices, proposal, tree, via, size, member, costs, width)
        for z in range(size):
            member[tree[z]] = 0
        if gain <= tolerance:
            for z in range(size):
                proposal[tree[z]] = choices[tree[z]]
        elif limited:
            if try_move(graph, usage, tree, size, choices, proposal, usage_now, change):
                gained += gain
        else:
            gained += gain
            for z in range(size):
                choices[tree[z]] = proposal[tree[z]]
    return gained
