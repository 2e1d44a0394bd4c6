"""Isolated nodes that compete for one or two full rows: a multiple-choice knapsack by dynamic programming.

Around an assignment within the limits, the nodes that use a row are chosen anew, all else as it is. That row and
the one that stands most in the way besides are the knapsack's capacities; at all other rows each node may take
what is reserved for it, so that the result is within all limits (Kellerer, Pferschy, Pisinger: Knapsack Problems,
2004, section 11.5). States count what is left, in units: where a state for every amount would be too many, changes
are rounded up to a coarser unit and room is rounded down. The present choices change nothing and so are always
there: the result never costs more, and is optimal where the unit is 1 and nothing else is in the way.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.flat import FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.multiple_choice_knapsack import RowIndex, move_alone, users_of

KNAPSACK_NODES = 48
"""Nodes of a knapsack."""

KNAPSACK_STATES = 1 << 16
"""Steps into which the room of one row is divided."""

KNAPSACK_STATES_A_SIDE = 1 << 8
"""The same for each of two rows."""

_NEVER = 1e300
"""Not tunable: above any cost."""


@compiled
def _change(usage: Usage, node: int, present: int, strategy: int, row: int) -> float:
    """Return how much more of ``row`` another strategy of an isolated node uses."""
    change = 0.0
    for q in range(usage.node_start[node], usage.node_start[node + 1]):
        if usage.low[q] <= row < usage.high[q]:
            start = usage.amount_start[q]
            change += usage.amount[start + strategy] - usage.amount[start + present]
    return change


@compiled
def _span(usage: Usage, node: int) -> tuple[int, int]:
    """Return the first row that a node uses, and the one after the last."""
    low, high = len(usage.limit), 0
    for q in range(usage.node_start[node], usage.node_start[node + 1]):
        low, high = min(low, usage.low[q]), max(high, usage.high[q])
    return low, high


@compiled
def _core(graph: Graph, usage: Usage, priced: FloatArray, choices: IntArray, index: RowIndex, row: int) -> IntArray:
    """Return the nodes that use ``row`` and for which another strategy costs about as much at the prices."""
    users = users_of(usage, index, row)
    distance = np.empty(len(users))
    for k in range(len(users)):
        costs, present, least = graph.offset[users[k]], choices[users[k]], _NEVER
        for s in range(graph.sizes[users[k]]):
            if s != present:
                least = min(least, priced[costs + s] - priced[costs + present])
        # Noise, so that not always the same nodes are chosen.
        distance[k] = least * (0.5 + np.random.random()) if least > 0.0 else least  # noqa: NPY002
    return users[np.argsort(distance)[:KNAPSACK_NODES]]


@compiled
def _second_row(graph: Graph, usage: Usage, choices: IntArray, nodes: IntArray, row: int, usage_now: FloatArray) -> int:
    """Return the row besides ``row`` that would be furthest over its limit if all took what uses most, or -1."""
    more = np.zeros(len(usage_now) + 1)
    first, end = len(usage_now), 0
    for i in nodes:
        low, high = _span(usage, i)
        first, end = min(first, low), max(end, high)
        for q in range(usage.node_start[i], usage.node_start[i + 1]):
            amounts = usage.amount[usage.amount_start[q] : usage.amount_start[q] + graph.sizes[i]]
            extra = amounts.max() - amounts[choices[i]]
            more[usage.low[q]] += extra
            more[usage.high[q]] -= extra
    second, worst, running = -1, 0.0, 0.0
    for t in range(first, end):
        running += more[t]
        if t != row and usage_now[t] + running - usage.limit[t] > worst:
            second, worst = t, usage_now[t] + running - usage.limit[t]
    return second


@compiled
def _admit(
    graph: Graph,
    usage: Usage,
    choices: IntArray,
    nodes: IntArray,
    first: int,
    second: int,
    usage_now: FloatArray,
    admitted: IntArray,
) -> None:
    """Flag the strategies that fit at all rows but two, whatever the other nodes take; the present ones always do."""
    reserved = np.zeros(len(usage_now))
    for k in range(len(nodes)):
        i = nodes[k]
        low, high = _span(usage, i)
        most = np.zeros(max(0, high - low))
        for s in range(graph.sizes[i]):
            fits = True
            for t in range(low, high):
                if t != first and t != second:
                    extra = _change(usage, i, choices[i], s, t)
                    fits &= extra <= 0.0 or usage_now[t] + reserved[t] + extra <= usage.limit[t]
            admitted[k, s] = 1 if fits else 0
            if fits:
                for t in range(low, high):
                    most[t - low] = max(most[t - low], _change(usage, i, choices[i], s, t))
        for t in range(low, high):
            reserved[t] += most[t - low]


@compiled
def _count_steps(
    graph: Graph,
    usage: Usage,
    choices: IntArray,
    nodes: IntArray,
    row: int,
    room: float,
    admitted: IntArray,
    most_states: int,
    steps: IntArray,
) -> int:
    """Write how many units of ``row`` each strategy takes beyond the least of its node; return how many there are.

    The unit is as small as ``most_states`` allow. Where the row is -1 nothing takes anything.
    """
    if row < 0:
        return 0
    largest = room
    for i in nodes:
        present = choices[i]
        freed = 0.0
        for s in range(graph.sizes[i]):
            freed = max(freed, -_change(usage, i, present, s, row))
        largest += freed
    unit = max(1.0, np.ceil((largest + 1.0) / most_states))
    units = int(room // unit)
    for k in range(len(nodes)):
        i, least = nodes[k], 0
        for s in range(graph.sizes[i]):
            if admitted[k, s]:
                steps[k, s] = int(np.ceil(_change(usage, i, choices[i], s, row) / unit))
                least = min(least, steps[k, s])
        for s in range(graph.sizes[i]):
            steps[k, s] -= least
        units -= least
    return units


@compiled
def _least_costs(
    graph: Graph,
    unary: FloatArray,
    choices: IntArray,
    nodes: IntArray,
    admitted: IntArray,
    steps: IntArray,
    other_steps: IntArray,
    cost: FloatArray,
    taken: NDArray[np.int16],
) -> FloatArray:
    """Return the least cost by what is left of both rows after all nodes, given ``cost`` before them.

    ``taken`` gets the strategy of each node that leads to each state at its cost.
    """
    states, other_states = cost.shape
    for k in range(len(nodes)):
        i = nodes[k]
        following = np.full((states, other_states), _NEVER)
        for s in range(graph.sizes[i]):
            if not admitted[k, s]:
                continue
            step, other = steps[k, s], other_steps[k, s]
            price = unary[graph.offset[i] + s] - unary[graph.offset[i] + choices[i]]
            for left in range(step, states):
                for other_left in range(other, other_states):
                    before = cost[left, other_left]
                    if before < _NEVER and before + price < following[left - step, other_left - other]:
                        following[left - step, other_left - other] = before + price
                        taken[k, left - step, other_left - other] = s
        cost = following
    return cost


@compiled
def fill_rows(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    priced: FloatArray,
    choices: IntArray,
    index: RowIndex,
    row: int,
    usage_now: FloatArray,
    tolerance: float,
) -> float:
    """Choose anew for isolated nodes that use ``row``, within the limits; return the gain.

    Parameters
    ----------
    graph, usage, unary
        A flat problem without prices.
    priced
        Costs of nodes with memory prices, laid out as ``unary``: nodes with another strategy of about the same
        priced cost take part, a few dozen at most.
    choices
        Any assignment within the limits; stays so, and never costs more. Changed in place.
    index
        The isolated nodes.
    row
        One that is full, or nothing is to be expected.
    usage_now
        Usage of every row, shape ``(rows,)``; changed in place.
    tolerance
        Least gain, in cost.
    """
    nodes = _core(graph, usage, priced, choices, index, row)
    if not len(nodes):
        return 0.0
    other = _second_row(graph, usage, choices, nodes, row, usage_now)
    room = usage.limit[row] - usage_now[row]
    other_room = usage.limit[other] - usage_now[other] if other >= 0 else 0.0
    if room < 0.0 or other_room < 0.0:
        return 0.0
    widest = 1
    for i in nodes:
        widest = max(widest, graph.sizes[i])
    admitted = np.zeros((len(nodes), widest), np.int64)
    _admit(graph, usage, choices, nodes, row, other, usage_now, admitted)
    side = KNAPSACK_STATES if other < 0 else KNAPSACK_STATES_A_SIDE
    steps, other_steps = np.zeros((2, len(nodes), widest), np.int64)
    units = _count_steps(graph, usage, choices, nodes, row, room, admitted, side, steps)
    other_units = _count_steps(graph, usage, choices, nodes, other, other_room, admitted, side, other_steps)
    states, other_states = units + 1, other_units + 1
    cost = np.full((states, other_states), _NEVER)
    cost[units, other_units] = 0.0
    taken = np.full((len(nodes), states, other_states), -1, np.int16)
    cost = _least_costs(graph, unary, choices, nodes, admitted, steps, other_steps, cost, taken)
    best = np.argmin(cost)
    left, other_left = best // other_states, best % other_states
    gain = float(-cost[left, other_left])
    if gain <= tolerance:
        return 0.0
    for k in range(len(nodes) - 1, -1, -1):
        s = taken[k, left, other_left]
        left += steps[k, s]
        other_left += other_steps[k, s]
        move_alone(usage, choices, nodes[k], s, usage_now)
    return gain
