"""A canonical problem in flat arrays, for compiled search and message passing.

The reductions are exact: unary factors are folded into nodes, parallel factors are added up, strategies
without support are dropped (arc consistency), and only times at which a limit can bind become rows.
Costs become float64 and guide a search; they are never a result. Usages are integers held in float64:
where a total would exceed 2**52, usages and limits are rounded down to a coarser quantum. Every feasible
assignment stays feasible then, but an assignment found at a coarse quantum must be checked exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.arc_consistency import FactorGroup, group_factors, supported_strategies
from formulations.encodings.flat_rows import RowMap, build_rows
from formulations.problem.gc_pause import gc_paused
from formulations.problem.strategy_problem import BoolArray, Factor, IntArray, StrategyProblem, UsageTerm

FloatArray = NDArray[np.float64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


class Graph(NamedTuple):
    """Nodes and factors; the choices of a flat problem index supported strategies only.

    Node ``i`` owns entries ``offset[i]:offset[i + 1]`` of unary arrays. The table of factor ``f`` starts at
    ``table_start[f]``, with ``stride[f, k]`` between strategies of its ``k``-th node ``scope[f, k]``; its
    message to that node starts at ``message_start[f, k]``. The factors of node ``i`` are
    ``incident_factor[incident_start[i]:incident_start[i + 1]]``, in each of which it has axis ``incident_axis``.
    """

    sizes: IntArray
    offset: IntArray
    arity: IntArray
    scope: IntArray
    stride: IntArray
    table_start: IntArray
    table_size: IntArray
    message_start: IntArray
    incident_start: IntArray
    incident_factor: IntArray
    incident_axis: IntArray


class Usage(NamedTuple):
    """Usage terms over rows; a row is a (resource, time) at which the limit can bind.

    The terms of node ``i`` are ``node_start[i]:node_start[i + 1]``, those of factor ``f`` are
    ``factor_start[f]:factor_start[f + 1]``. Term ``q`` uses rows ``low[q]:high[q]`` and its amounts start at
    ``amount_start[q]``, laid out as the table it belongs to; equal terms may share them. ``limit`` has one
    entry per row.
    """

    node_start: IntArray
    factor_start: IntArray
    low: IntArray
    high: IntArray
    amount_start: IntArray
    amount: FloatArray
    limit: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class FlatProblem:
    """Result of :func:`flatten`: a problem in flat arrays.

    Parameters
    ----------
    graph, usage
        Structure and memory, see there.
    unary, tables
        Costs in float64; a forbidden combination costs ``penalty``, more than all else together.
    penalty
        See above.
    supported
        Per node the original indices of its remaining strategies.
    groups
        Per flat factor the factors of the problem that it adds up.
    rows
        From rows back to resources and times.
    contradiction
        Reason why no assignment exists, where one was found; the arrays are then not to be used.
    """

    graph: Graph
    usage: Usage
    unary: FloatArray
    tables: FloatArray
    penalty: float
    supported: tuple[IntArray, ...]
    groups: tuple[FactorGroup, ...]
    rows: RowMap
    contradiction: str

    def tables_to_price(self) -> FloatArray:
        """Return tables to which prices may be added: a copy, or ``tables`` themselves where no factor uses memory."""
        uses_memory = self.usage.factor_start[-1] > self.usage.factor_start[0]
        return self.tables.copy() if uses_memory else self.tables

    def original_choices(self, choices: IntArray) -> tuple[int, ...]:
        """Return the strategies of the problem that flat ``choices`` stand for."""
        return tuple(int(kept[choice]) for kept, choice in zip(self.supported, choices, strict=True))

    def flat_choices(self, original: tuple[int, ...]) -> IntArray | None:
        """Return the flat form of an assignment, or None where it uses a dropped strategy."""
        choices = np.zeros(len(self.supported), dtype=np.int64)
        for i, (kept, choice) in enumerate(zip(self.supported, original, strict=True)):
            place = int(np.searchsorted(kept, choice))
            if place == len(kept) or kept[place] != choice:
                return None
            choices[i] = place
        return choices


@gc_paused()
def flatten(problem: StrategyProblem) -> FlatProblem:
    """Lay a problem out in flat arrays, with the reductions of the module docstring."""
    unary_factors = [factor for factor in problem.factors if len(factor.scope) == 1]
    groups = group_factors(problem)
    alive, emptied = supported_strategies(problem, groups)
    contradiction = ""
    if emptied is not None:
        contradiction = f"node {emptied} ({problem.nodes[emptied].name}): every strategy is forbidden"
        alive = [np.ones(node.size, dtype=np.bool_) for node in problem.nodes]
    supported = equal_as_one([np.flatnonzero(mask).astype(np.int64) for mask in alive])
    groups = [group for group in groups if not _is_trivial(problem, group)]
    graph = _graph(supported, groups)
    unary = _unary_costs(problem, unary_factors, supported)
    tables, starts, forbidden = _tables(problem, groups, supported)
    graph = graph._replace(table_start=starts)
    scale = float(np.abs(unary).sum()) + sum(
        float(np.abs(tables[s : s + z]).max()) for s, z in zip(starts, graph.table_size, strict=True)
    )
    penalty = 1e3 * (scale + 1.0)
    tables[forbidden] = penalty
    node_terms, factor_terms = _usage_terms(problem, unary_factors, groups, supported)
    rows, usage = build_rows(problem, node_terms, factor_terms)
    contradiction = contradiction or rows.contradiction
    return FlatProblem(graph, Usage(*usage), unary, tables, penalty, supported, tuple(groups), rows, contradiction)


def message_entries(graph: Graph) -> int:
    """Return the length of an array of messages, one entry per factor, axis and strategy."""
    held = graph.scope >= 0
    return int(graph.sizes[graph.scope[held]].sum())


def restricted(table: NDArray[_Scalar], kept: Sequence[IntArray]) -> NDArray[_Scalar]:
    """Return a table over the kept strategies of each axis; the table itself where all are kept."""
    if table.shape == tuple(map(len, kept)):
        return table
    return table[np.ix_(*kept)]


def _is_trivial(problem: StrategyProblem, group: FactorGroup) -> bool:
    members = [problem.factors[j] for j in group.members]
    return not any(factor.cost.any() or factor.usage or factor.forbidden is not None for factor in members)


def _graph(supported: tuple[IntArray, ...], groups: list[FactorGroup]) -> Graph:
    sizes = np.array([len(kept) for kept in supported], dtype=np.int64)
    count = len(groups)
    arity = np.array([len(group.scope) for group in groups], dtype=np.int64)
    scope = np.full((count, 3), -1, dtype=np.int64)
    stride = np.zeros((count, 3), dtype=np.int64)
    message_size = np.zeros((count, 3), dtype=np.int64)
    table_size = np.ones(count, dtype=np.int64)
    for axis in (2, 1, 0):
        has_axis = arity > axis
        scope[has_axis, axis] = [group.scope[axis] for group in groups if len(group.scope) > axis]
        stride[has_axis, axis] = table_size[has_axis]
        message_size[has_axis, axis] = sizes[scope[has_axis, axis]]
        table_size[has_axis] *= message_size[has_axis, axis]
    message_start = (np.cumsum(message_size.ravel()) - message_size.ravel()).reshape(count, 3)
    factor, axis_of = np.nonzero(scope >= 0)
    by_node = np.argsort(scope[factor, axis_of], kind="stable")
    degree = np.bincount(scope[factor, axis_of], minlength=len(sizes))
    return Graph(
        sizes,
        _starts(sizes),
        arity,
        scope,
        stride,
        np.zeros(count, dtype=np.int64),
        table_size,
        message_start,
        _starts(degree),
        factor[by_node].astype(np.int64),
        axis_of[by_node].astype(np.int64),
    )


def _unary_costs(problem: StrategyProblem, unary_factors: list[Factor], supported: tuple[IntArray, ...]) -> FloatArray:
    costs = [node.cost.astype(np.float64) for node in problem.nodes]
    for factor in unary_factors:
        costs[factor.scope[0]] += factor.cost
    return np.concatenate([cost[kept] for cost, kept in zip(costs, supported, strict=True)] or [np.zeros(0)])


def _tables(
    problem: StrategyProblem, groups: list[FactorGroup], supported: tuple[IntArray, ...]
) -> tuple[FloatArray, IntArray, BoolArray]:
    """Cost tables one after another; factors without usage that share their arrays share a table."""
    seen: dict[tuple[object, ...], int] = {}
    starts = np.zeros(len(groups), dtype=np.int64)
    pieces: list[FloatArray] = []
    flags: list[BoolArray] = []
    end = 0
    for g, group in enumerate(groups):
        members = [problem.factors[j] for j in group.members]
        kept = [supported[i] for i in group.scope]
        key: tuple[object, ...] | None = None
        if not any(factor.usage for factor in members):
            arrays = tuple((id(factor.cost), id(factor.forbidden)) for factor in members)
            key = (arrays, group.axes, tuple(k.tobytes() for k in kept))
            if key in seen:
                starts[g] = seen[key]
                continue
        cost: FloatArray = restricted(group.oriented(0, members[0].cost), kept).astype(np.float64, order="C")
        for m, factor in enumerate(members[1:], 1):
            cost += restricted(group.oriented(m, factor.cost), kept)
        flag = np.zeros(cost.shape, dtype=np.bool_)
        for m, factor in enumerate(members):
            if factor.forbidden is not None:
                flag |= restricted(group.oriented(m, factor.forbidden), kept)
                cost[flag] = 0.0
        starts[g] = end
        if key is not None:
            seen[key] = end
        pieces.append(cost.ravel())
        flags.append(flag.ravel())
        end += cost.size
    if not pieces:
        return np.zeros(0), starts, np.zeros(0, dtype=np.bool_)
    return np.concatenate(pieces), starts, np.concatenate(flags)


def _usage_terms(
    problem: StrategyProblem,
    unary_factors: list[Factor],
    groups: list[FactorGroup],
    supported: tuple[IntArray, ...],
) -> tuple[list[list[UsageTerm]], list[list[UsageTerm]]]:
    """Usage terms per node and per flat factor, amounts restricted to supported strategies and raveled."""
    of_nodes = [
        [_raveled(term, restricted(term.amount, [kept])) for term in node.usage]
        for node, kept in zip(problem.nodes, supported, strict=True)
    ]
    for factor in unary_factors:
        i = factor.scope[0]
        of_nodes[i] += [_raveled(term, term.amount[supported[i]]) for term in factor.usage]
    # Equal terms of equal factors stay one array, from the models' tables to the rows.
    known: dict[tuple[object, ...], IntArray] = {}
    of_factors = []
    for group in groups:
        kept = [supported[i] for i in group.scope]
        terms = []
        for m, j in enumerate(group.members):
            for term in problem.factors[j].usage:
                key = (id(term.amount), group.axes[m], *map(id, kept))
                if key not in known:
                    known[key] = _flat(restricted(group.oriented(m, term.amount), kept))
                terms.append(UsageTerm(term.resource, term.start, term.end, known[key]))
        of_factors.append(terms)
    return of_nodes, of_factors


def equal_as_one(arrays: Iterable[IntArray]) -> tuple[IntArray, ...]:
    """Return the arrays, equal ones as one object."""
    known: dict[bytes, IntArray] = {}
    return tuple(known.setdefault(array.tobytes(), array) for array in arrays)


def _raveled(term: UsageTerm, amount: IntArray) -> UsageTerm:
    if amount is term.amount and amount.ndim == 1 and amount.flags.c_contiguous:
        return term
    return UsageTerm(term.resource, term.start, term.end, _flat(amount))


def _flat(amount: IntArray) -> IntArray:
    return np.ascontiguousarray(amount).ravel()


def _starts(lengths: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
