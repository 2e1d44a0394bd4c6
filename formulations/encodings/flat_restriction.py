"""Restriction of a flat problem to fewer strategies, for the branches of a search.

Tables shrink to the strategies that are left. A node with one strategy left is decided: its factors become tables of
their other nodes (unary ones where one node is left), so no message passes through it any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, Graph, Usage, message_entries
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray

FORBIDDEN_SHARE = 0.5
"""A cost above this part of the penalty is a forbidden combination."""

_WORTH_COPYING = 0.5
"""Part of the table entries left up to which smaller tables are worth the copying."""


@dataclass(frozen=True, slots=True, eq=False)
class Restriction:
    """Result of :func:`restrict` and :func:`narrow`: the restricted problem and its places in the original.

    Parameters
    ----------
    flat
        The restricted problem: same nodes and rows, fewer strategies and factors, or the same ones of which some are
        forbidden. Its ``supported`` and ``groups`` are those of the original and mean nothing here.
    entries
        Per strategy of the restricted problem (laid out as ``unary``) its place in the original's ``unary``.
    messages
        Per entry of the restricted messages its place in the original's.
    """

    flat: FlatProblem
    entries: IntArray
    messages: IntArray

    @property
    def left(self) -> BoolArray:
        """Flags of the strategies of ``flat`` that are not forbidden, laid out as its ``unary``."""
        return self.flat.unary < FORBIDDEN_SHARE * self.flat.penalty

    def original(self, choices: IntArray, offset: IntArray) -> IntArray:
        """Return choices of the original problem, whose ``graph.offset`` is ``offset``."""
        nodes = len(choices)
        result: IntArray = self.entries[self.flat.graph.offset[:nodes] + choices] - offset[:nodes]
        return result


def narrow(flat: FlatProblem, allowed: BoolArray) -> Restriction | None:
    """Keep the ``allowed`` strategies as :func:`restrict` does; where most entries are left, others stay as forbidden.

    Then all arrays but ``unary`` are those of ``flat``, and nothing is copied. Strategies that a factor supports with
    nothing that is left are dropped. Otherwise messages would carry the penalty, and no exact bound could follow.
    """
    graph, limit = flat.graph, FORBIDDEN_SHARE * flat.penalty
    allowed = allowed & (flat.unary < limit)
    _drop_unsupported(graph, flat.tables, limit, allowed, np.logical_or.reduceat(~allowed, graph.offset[:-1]))
    sizes = np.add.reduceat(allowed, graph.offset[:-1], dtype=np.int64)
    if not sizes.all():
        return None
    entries = np.where(graph.scope >= 0, sizes[graph.scope], 1).prod(axis=1).sum()
    if entries <= _WORTH_COPYING * graph.table_size.sum():
        return restrict(flat, allowed)
    same = replace(flat, unary=np.where(allowed, flat.unary, flat.penalty))
    return Restriction(same, np.arange(len(allowed)), np.arange(message_entries(graph)))


@compiled
def _drop_unsupported(graph: Graph, tables: FloatArray, limit: float, allowed: BoolArray, shrank: BoolArray) -> None:
    """Clear the flags of strategies without support, beginning with the factors of the nodes that ``shrank``."""
    while shrank.any():
        before = shrank.copy()
        shrank[:] = False
        for f in range(len(graph.arity)):
            touched = False
            for k in range(graph.arity[f]):
                touched = touched or before[graph.scope[f, k]]
            if not touched:
                continue
            for k in range(graph.arity[f]):
                i = graph.scope[f, k]
                for s in range(graph.offset[i], graph.offset[i + 1]):
                    if allowed[s] and not _is_supported(graph, tables, limit, allowed, f, k, s - graph.offset[i]):
                        allowed[s] = False
                        shrank[i] = True


@compiled
def _is_supported(
    graph: Graph, tables: FloatArray, limit: float, allowed: BoolArray, f: int, k: int, strategy: int
) -> bool:
    """Whether a factor allows a strategy of its node ``k`` together with some that are left of its other nodes."""
    start = graph.table_start[f] + strategy * graph.stride[f, k]
    if graph.arity[f] == 1:
        return bool(tables[start] < limit)
    a, b = (k + 1) % graph.arity[f], (k + 2) % graph.arity[f]
    first, second = graph.scope[f, a], graph.scope[f, b]
    for x in range(graph.sizes[first]):
        if not allowed[graph.offset[first] + x]:
            continue
        at = start + x * graph.stride[f, a]
        if graph.arity[f] == 2:
            if tables[at] < limit:
                return True
            continue
        for y in range(graph.sizes[second]):
            if allowed[graph.offset[second] + y] and tables[at + y * graph.stride[f, b]] < limit:
                return True
    return False


def restrict(flat: FlatProblem, allowed: BoolArray) -> Restriction | None:
    """Keep the ``allowed`` strategies (flags laid out as ``flat.unary``) and drop those that they leave unsupported.

    Returns
    -------
    Restriction or None
        None where a node has no strategy left.
    """
    limit = FORBIDDEN_SHARE * flat.penalty
    allowed = allowed & (flat.unary < limit)
    while True:
        kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(allowed)])
        sizes = np.diff(kept[flat.graph.offset])
        if not sizes.all():
            return None
        entries = np.flatnonzero(allowed).astype(np.int64)
        restricted, messages = _restricted(flat, entries, sizes)
        refused = restricted.unary >= limit
        if not refused.any():
            return Restriction(restricted, entries, messages)
        allowed[entries[refused]] = False


def _restricted(flat: FlatProblem, entries: IntArray, sizes: IntArray) -> tuple[FlatProblem, IntArray]:
    graph = flat.graph
    offset = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    labels = entries - np.repeat(graph.offset[:-1], sizes)
    arrays = _arrays(graph.table_start), _arrays(flat.usage.amount_start)
    counts = _count(graph, flat.usage, sizes, *arrays)
    unary = flat.unary[entries]
    # Allocated by NumPy, which requests huge pages: compiled code would take twice as long to touch new memory.
    tables, amount = np.empty(counts[1]), np.empty(counts[3])
    limit = FORBIDDEN_SHARE * flat.penalty
    new_graph, usage, messages = _fill(
        graph,
        flat.usage,
        flat.tables,
        *arrays,
        tables,
        amount,
        unary,
        sizes,
        offset,
        labels,
        limit,
        flat.penalty,
        counts,
    )
    return replace(flat, graph=_with_incidence(new_graph), usage=usage, unary=unary, tables=tables), messages


def _arrays(starts: IntArray) -> IntArray:
    """Return which array each start is that of: several tables, or terms, may have the same."""
    return np.unique(starts, return_inverse=True)[1].astype(np.int64)


def _with_incidence(graph: Graph) -> Graph:
    factor, axis = np.nonzero(graph.scope >= 0)
    nodes = graph.scope[factor, axis]
    by_node = np.argsort(nodes, kind="stable")
    degree = np.bincount(nodes, minlength=len(graph.sizes))
    return graph._replace(
        incident_start=np.concatenate([np.zeros(1, np.int64), np.cumsum(degree, dtype=np.int64)]),
        incident_factor=factor[by_node].astype(np.int64),
        incident_axis=axis[by_node].astype(np.int64),
    )


@compiled
def _open_axes(graph: Graph, sizes: IntArray, f: int) -> tuple[int, bool, int, int]:
    """Return how many nodes of a factor are undecided, whether any shrank, entries left, and the node to fold into."""
    undecided, shrank, entries = 0, False, 1
    target = graph.scope[f, 0]
    for k in range(graph.arity[f]):
        i = graph.scope[f, k]
        entries *= sizes[i]
        shrank = shrank or sizes[i] < graph.sizes[i]
        if sizes[i] > 1:
            undecided += 1
            target = i
    return undecided, shrank, entries, target


@compiled
def _count(graph: Graph, usage: Usage, sizes: IntArray, table_array: IntArray, amount_array: IntArray) -> IntArray:
    """Return the factors left, and the entries of tables, messages, and amounts; whole arrays are counted once."""
    factors, table, messages, amounts = 0, 0, 0, 0
    table_seen = np.zeros(len(table_array), np.bool_)
    amount_seen = np.zeros(len(amount_array), np.bool_)
    for i in range(len(sizes)):
        for q in range(usage.node_start[i], usage.node_start[i + 1]):
            whole = sizes[i] == graph.sizes[i]
            if not (whole and amount_seen[amount_array[q]]):
                amounts += sizes[i]
            amount_seen[amount_array[q]] |= whole
    for f in range(len(graph.arity)):
        undecided, shrank, entries, _ = _open_axes(graph, sizes, f)
        whole = undecided > 1 and not shrank
        if undecided > 1:
            factors += 1
            for k in range(graph.arity[f]):
                if sizes[graph.scope[f, k]] > 1:
                    messages += sizes[graph.scope[f, k]]
            if not (whole and table_seen[table_array[f]]):
                table += entries
            table_seen[table_array[f]] |= whole
        for q in range(usage.factor_start[f], usage.factor_start[f + 1]):
            if not (whole and amount_seen[amount_array[q]]):
                amounts += entries
            amount_seen[amount_array[q]] |= whole
    return np.array([factors, table, messages, amounts])


@compiled
def _copy_block(
    graph: Graph,
    values: FloatArray,
    start: int,
    sizes: IntArray,
    offset: IntArray,
    labels: IntArray,
    f: int,
    out: FloatArray,
    place: int,
) -> int:
    """Copy the kept part of a factor's table, which starts at ``values[start]``, to ``out[place:]``; return its end."""
    first = graph.scope[f, 0]
    for a in range(sizes[first]):
        at_first = start + labels[offset[first] + a] * graph.stride[f, 0]
        if graph.arity[f] == 1:
            out[place] = values[at_first]
            place += 1
            continue
        second = graph.scope[f, 1]
        for b in range(sizes[second]):
            at_second = at_first + labels[offset[second] + b] * graph.stride[f, 1]
            if graph.arity[f] == 2:
                out[place] = values[at_second]
                place += 1
                continue
            third = graph.scope[f, 2]
            for c in range(sizes[third]):
                out[place] = values[at_second + labels[offset[third] + c] * graph.stride[f, 2]]
                place += 1
    return place


@compiled
def _move(
    values: FloatArray, start: int, size: int, moved: IntArray, array: int, out: FloatArray, place: int
) -> tuple[int, int]:
    """Copy a whole array to ``out[place:]`` unless it was; return where it begins there, and the end of ``out``."""
    if moved[array] < 0:
        moved[array] = place
        out[place : place + size] = values[start : start + size]
        place += size
    return moved[array], place


@compiled
def _fill(
    graph: Graph,
    usage: Usage,
    old_tables: FloatArray,
    table_array: IntArray,
    amount_array: IntArray,
    tables: FloatArray,
    amount: FloatArray,
    unary: FloatArray,
    sizes: IntArray,
    offset: IntArray,
    labels: IntArray,
    limit: float,
    penalty: float,
    counts: IntArray,
) -> tuple[Graph, Usage, IntArray]:
    """Write the restricted arrays; costs of factors with decided nodes are added to ``unary`` of their neighbours.

    Arrays of ``tables`` and ``amount`` that stay whole are copied once, for all that share them.
    """
    nodes = len(sizes)
    factors = counts[0]
    arity = np.zeros(factors, np.int64)
    scope = np.full((factors, 3), -1, np.int64)
    stride, message_start = np.zeros((factors, 3), np.int64), np.zeros((factors, 3), np.int64)
    table_start, table_size = np.zeros(factors, np.int64), np.ones(factors, np.int64)
    messages = np.zeros(counts[2], np.int64)
    table_end, amount_end = 0, 0
    table_moved = np.full(len(table_array), -1, np.int64)
    amount_moved = np.full(len(amount_array), -1, np.int64)
    term_amount = np.zeros(len(usage.low), np.int64)
    owner = np.zeros(len(usage.low), np.int64)
    for i in range(nodes):
        for q in range(usage.node_start[i], usage.node_start[i + 1]):
            owner[q] = i
            start = usage.amount_start[q]
            if sizes[i] == graph.sizes[i]:
                term_amount[q], amount_end = _move(
                    usage.amount, start, sizes[i], amount_moved, amount_array[q], amount, amount_end
                )
            else:
                term_amount[q] = amount_end
                for s in range(sizes[i]):
                    amount[amount_end] = usage.amount[start + labels[offset[i] + s]]
                    amount_end += 1
    kept, message_end = 0, 0
    widest = 1
    for i in range(nodes):
        widest = max(widest, sizes[i])
    block = np.empty(widest)
    for f in range(len(graph.arity)):
        undecided, shrank, entries, target = _open_axes(graph, sizes, f)
        whole = undecided > 1 and not shrank
        for q in range(usage.factor_start[f], usage.factor_start[f + 1]):
            owner[q] = nodes + kept if undecided > 1 else target
            start = usage.amount_start[q]
            if whole:
                term_amount[q], amount_end = _move(
                    usage.amount, start, entries, amount_moved, amount_array[q], amount, amount_end
                )
            else:
                term_amount[q] = amount_end
                amount_end = _copy_block(graph, usage.amount, start, sizes, offset, labels, f, amount, amount_end)
        if undecided <= 1:
            _copy_block(graph, old_tables, graph.table_start[f], sizes, offset, labels, f, block, 0)
            for s in range(entries):
                at = offset[target] + s
                unary[at] = penalty if max(block[s], unary[at]) >= limit else unary[at] + block[s]
            continue
        start = graph.table_start[f]
        if whole:
            table_start[kept], table_end = _move(
                old_tables, start, entries, table_moved, table_array[f], tables, table_end
            )
        else:
            table_start[kept] = table_end
            table_end = _copy_block(graph, old_tables, start, sizes, offset, labels, f, tables, table_end)
        for k in range(graph.arity[f]):
            i = graph.scope[f, k]
            if sizes[i] > 1:
                axis = arity[kept]
                arity[kept] += 1
                scope[kept, axis] = i
                message_start[kept, axis] = message_end
                for s in range(sizes[i]):
                    messages[message_end] = graph.message_start[f, k] + labels[offset[i] + s]
                    message_end += 1
        for axis in range(arity[kept] - 1, -1, -1):
            stride[kept, axis] = table_size[kept]
            table_size[kept] *= sizes[scope[kept, axis]]
        kept += 1
    # Terms move to their new owners, in their old order.
    starts = np.zeros(nodes + factors + 1, np.int64)
    for q in range(len(owner)):
        starts[owner[q] + 1] += 1
    for b in range(nodes + factors):
        starts[b + 1] += starts[b]
    place = starts.copy()
    low, high = np.empty(len(owner), np.int64), np.empty(len(owner), np.int64)
    amount_start = np.empty(len(owner), np.int64)
    for q in range(len(owner)):
        at = place[owner[q]]
        place[owner[q]] += 1
        low[at], high[at], amount_start[at] = usage.low[q], usage.high[q], term_amount[q]
    restricted = Graph(
        sizes,
        offset,
        arity,
        scope,
        stride,
        table_start,
        table_size,
        message_start,
        graph.incident_start,
        graph.incident_factor,
        graph.incident_axis,
    )
    # As in flat problems: terms of nodes come first, then those of factors.
    node_start, factor_start = starts[: nodes + 1].copy(), starts[nodes:].copy()
    return (
        restricted,
        Usage(node_start, factor_start, low, high, amount_start, amount, usage.limit),
        messages,
    )
