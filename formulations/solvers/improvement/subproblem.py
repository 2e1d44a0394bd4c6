"""A part of a problem with everything else fixed, as a problem of its own.

The chosen nodes stay free; their factors with fixed nodes become costs and usages of the free ones, and what the
fixed nodes use is taken off the limits. Rows between which no free usage starts or ends are one time of the part,
with the least of their remaining limits; rows at which the part cannot reach the limit are left out.

Remaining limits differ from time to time, whereas a :class:`~formulations.problem.strategy_problem.Resource` has one
limit: a last node with a single strategy, the *ballast*, uses what the others have taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, Graph, Usage
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import (
    BoolArray,
    Factor,
    IntArray,
    Node,
    Resource,
    StrategyProblem,
    UsageTerm,
)
from formulations.solvers.local_search.moves import entry_without

_LARGEST_COST = 2.0**58
"""Not tunable: costs of a part are divided by a power of two until they are below it."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What :func:`cut_out` returns.

    Parameters
    ----------
    problem
        The free nodes in the order given, then the ballast where there is a limit to keep.
    nodes
        The free nodes in the flat problem.
    strategies
        Per free node the flat strategies that its own ones stand for.
    start
        The present choices in terms of ``problem``.
    """

    problem: StrategyProblem
    nodes: IntArray
    strategies: tuple[IntArray, ...]
    start: tuple[int, ...]

    def flat_choices(self, choices: tuple[int, ...]) -> IntArray:
        """Return the flat strategies of the free nodes that ``choices`` of the part's problem stand for."""
        pairs = zip(self.strategies, choices, strict=False)
        return np.array([kept[choice] for kept, choice in pairs], dtype=np.int64)


@dataclass(slots=True, eq=False)
class _Table:
    """Costs over free nodes (places in the part) and usage terms over flat rows."""

    scope: tuple[int, ...]
    cost: FloatArray
    usage: list[tuple[int, int, FloatArray]]


def cut_out(flat: FlatProblem, choices: IntArray, usage_now: FloatArray, nodes: IntArray) -> Part:
    """Cut the problem of some nodes out, all others fixed at their choices.

    Parameters
    ----------
    choices, usage_now
        An assignment within the limits and its usage, shape ``(rows,)``.
    nodes
        Distinct nodes. They keep the strategies that no fixed neighbour forbids.
    """
    tables = _free_tables(flat, choices, nodes)
    # Costs may be negative, but all together they are far from the penalty.
    strategies = tuple(
        np.flatnonzero(table.cost < 0.5 * flat.penalty).astype(np.int64) for table in tables[: len(nodes)]
    )
    for table in tables:
        kept = [strategies[z] for z in table.scope]
        table.cost = _restricted(table.cost, kept)
        table.usage = [(low, high, _restricted(amount, kept)) for low, high, amount in table.usage]
    start = tuple(int(np.searchsorted(kept, choices[i])) for kept, i in zip(strategies, nodes, strict=True))
    times, room = _times(flat, tables, start, usage_now)
    return Part(_problem(flat, tables, times, room), nodes, strategies, start if not len(room) else (*start, 0))


def _free_tables(flat: FlatProblem, choices: IntArray, nodes: IntArray) -> list[_Table]:
    """Return one table per free node, then one per factor of several, sliced at the choices of fixed nodes."""
    graph, usage = flat.graph, flat.usage
    place = np.full(len(graph.sizes), -1, dtype=np.int64)
    place[nodes] = np.arange(len(nodes))
    start = np.concatenate([np.zeros(1, np.int64), np.cumsum(graph.sizes[nodes])])
    costs, joint, using = _conditional_costs(graph, usage, flat.unary, flat.tables, choices, nodes, place, start)
    tables = []
    for z, i in enumerate(nodes.tolist()):
        cost = costs[start[z] : start[z + 1]]
        tables.append(_Table((z,), cost, _terms(flat, usage.node_start, i, (slice(None),), cost.shape)))
    for f in using.tolist():
        shape, places, index = _slice(flat, f, choices, place)
        tables[max(places)].usage += _terms(flat, usage.factor_start, f, index, shape)
    for f in joint.tolist():
        shape, places, index = _slice(flat, f, choices, place)
        first = graph.table_start[f]
        cost = flat.tables[first : first + graph.table_size[f]].reshape(shape)[index]
        scope = tuple(z for z in places if z >= 0)
        tables.append(_Table(scope, cost, _terms(flat, usage.factor_start, f, index, shape)))
    return tables


@compiled
def _conditional_costs(
    graph: Graph,
    usage: Usage,
    unary: FloatArray,
    tables: FloatArray,
    choices: IntArray,
    nodes: IntArray,
    place: IntArray,
    start: IntArray,
) -> tuple[FloatArray, IntArray, IntArray]:
    """Return what depends on single free nodes, and the factors that need a closer look.

    Parameters
    ----------
    place
        Place of every node among the free ``nodes``, -1 for fixed ones.
    start
        Where the strategies of a free node begin in the result.

    Returns
    -------
    tuple
        Costs of the free nodes' strategies, with their factors of fixed neighbours; factors of several free nodes;
        factors of one free node that use rows.
    """
    costs = np.empty(start[-1])
    most = 0
    for i in nodes:
        most += graph.incident_start[i + 1] - graph.incident_start[i]
    joint, using = np.empty(most, np.int64), np.empty(most, np.int64)
    joints, users = 0, 0
    for z in range(len(nodes)):
        i = nodes[z]
        for s in range(graph.sizes[i]):
            costs[start[z] + s] = unary[graph.offset[i] + s]
        for a in range(graph.incident_start[i], graph.incident_start[i + 1]):
            f, axis = graph.incident_factor[a], graph.incident_axis[a]
            before, after = 0, 0
            for k in range(graph.arity[f]):
                if k != axis and place[graph.scope[f, k]] >= 0:
                    if k < axis:
                        before += 1
                    else:
                        after += 1
            if before + after == 0:
                entry, step = graph.table_start[f] + entry_without(graph, f, axis, choices), graph.stride[f, axis]
                for s in range(graph.sizes[i]):
                    costs[start[z] + s] += tables[entry + s * step]
                if usage.factor_start[f] < usage.factor_start[f + 1]:
                    using[users] = f
                    users += 1
            elif before == 0:
                joint[joints] = f
                joints += 1
    return costs, joint[:joints], using[:users]


def _slice(
    flat: FlatProblem, factor: int, choices: IntArray, place: IntArray
) -> tuple[tuple[int, ...], list[int], tuple[slice | int, ...]]:
    """Return the shape of a factor, the places of its nodes (-1: fixed), and the index that fixes the fixed ones."""
    graph = flat.graph
    members = graph.scope[factor, : graph.arity[factor]]
    places: list[int] = place[members].tolist()
    index = tuple(
        slice(None) if z >= 0 else choice for z, choice in zip(places, choices[members].tolist(), strict=True)
    )
    return tuple(graph.sizes[members].tolist()), places, index


def _terms(
    flat: FlatProblem, first_term: IntArray, owner: int, index: tuple[slice | int, ...], shape: tuple[int, ...]
) -> list[tuple[int, int, FloatArray]]:
    usage, size = flat.usage, math.prod(shape)
    terms = []
    for q in range(first_term[owner], first_term[owner + 1]):
        amount = usage.amount[usage.amount_start[q] : usage.amount_start[q] + size].reshape(shape)[index]
        terms.append((int(usage.low[q]), int(usage.high[q]), amount))
    return terms


def _restricted(table: FloatArray, kept: list[IntArray]) -> FloatArray:
    full = all(len(strategies) == size for strategies, size in zip(kept, table.shape, strict=True))
    return table if full else table[np.ix_(*kept)]


def _times(
    flat: FlatProblem, tables: list[_Table], start: tuple[int, ...], usage_now: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Lay the part's times over the rows.

    Returns
    -------
    tuple
        Per row (and one past the last) the first time of the part that is not before it, shape ``(rows + 1,)``;
        and what the fixed nodes leave of the limit, per time.
    """
    rows = len(usage_now)
    present, most = np.zeros(rows + 1), np.zeros(rows + 1)
    event = np.zeros(rows + 1, dtype=np.bool_)
    for table in tables:
        entry = tuple(start[z] for z in table.scope)
        for low, high, amount in table.usage:
            event[low] = event[high] = True
            present[low] += amount[entry]
            present[high] -= amount[entry]
            largest = amount.max()
            most[low] += largest
            most[high] -= largest
    room = flat.usage.limit - usage_now + np.cumsum(present)[:rows]
    points = np.flatnonzero(event)
    if len(points) < 2:
        return np.zeros(rows + 1, dtype=np.int64), np.zeros(0)
    least = np.minimum.reduceat(room, points[:-1])
    if points[-1] < rows:
        least[-1] = room[points[-2] : points[-1]].min()
    binding = np.cumsum(most)[points[:-1]] > least
    before = np.concatenate([[0], np.cumsum(binding)])
    segment = np.minimum(np.searchsorted(points, np.arange(rows + 1)), len(points) - 1)
    return before[segment], least[binding]


def _problem(flat: FlatProblem, tables: list[_Table], times: IntArray, room: FloatArray) -> StrategyProblem:
    largest = max((float(np.abs(t.cost[t.cost < flat.penalty]).max(initial=0.0)) for t in tables), default=0.0)
    unit = 2.0 ** max(0, math.ceil(math.log2(largest / _LARGEST_COST))) if largest else 1.0
    nodes, factors = [], []
    for k, table in enumerate(tables):
        usage = tuple(
            UsageTerm(0, int(times[low]), int(times[high]), amount.astype(np.int64))
            for low, high, amount in table.usage
            if times[low] < times[high]
        )
        flags: BoolArray = table.cost >= flat.penalty
        cost = (np.where(flags, 0.0, table.cost) / unit).astype(np.int64)
        forbidden = flags if flags.any() else None
        if len(table.scope) == 1:
            nodes.append(Node(f"free {k}", cost, forbidden, usage))
        else:
            factors.append(Factor(table.scope, cost, forbidden, usage))
    limit = int(room.max(initial=0.0))
    if len(room):
        taken = limit - room.astype(np.int64)
        terms = tuple(UsageTerm(0, t, t + 1, taken[t : t + 1]) for t in np.flatnonzero(taken).tolist())
        nodes.append(Node("ballast", np.zeros(1, dtype=np.int64), None, terms))
    return StrategyProblem("part", tuple(nodes), tuple(factors), (Resource("rows", limit),), max(1, len(room)))
