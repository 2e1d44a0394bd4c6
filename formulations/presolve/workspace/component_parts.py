"""A few nodes that nothing else is coupled to, as arrays of their own: the same arrays for equal parts.

Costs are counted from each node's least, intervals are columns whose places in time are forgotten but for how
they overlap, and nodes stand in an order that does not depend on their indices. So two layers of a network that
differ in when they run, in what they cost at least, and in how their nodes are numbered, are equal here, and
their fronts are computed once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from formulations.presolve.workspace.canonical_order import View, canonical_order
from formulations.presolve.workspace.lift import Merged
from formulations.presolve.workspace.state import Integers, Interval, Scope, Table, Usage, Workspace
from formulations.presolve.workspace.tunables import WORTHWHILE_SHARE
from formulations.problem.strategy_problem import BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Coupling:
    """A table of a part; ``scope`` has places in the part, ``amounts`` one column per interval (last axis)."""

    scope: Scope
    cost: Integers
    forbidden: BoolArray | None
    amounts: Integers

    def turned(self, axes: tuple[int, ...], scope: Scope) -> Coupling:
        """Return the table with its axes in another order, over other places."""
        forbidden = None if self.forbidden is None else self.forbidden.transpose(axes)
        amounts = self.amounts.transpose(*axes, len(axes))
        return Coupling(scope, self.cost.transpose(axes), forbidden, amounts)

    def placed(self, place: Sequence[int]) -> Coupling:
        """Return the table where node ``k`` of the part is at ``place[k]``, its scope ascending."""
        axes = tuple(sorted(range(len(self.scope)), key=lambda axis: place[self.scope[axis]]))
        return self.turned(axes, tuple(place[self.scope[axis]] for axis in axes))

    def content(self) -> bytes:
        """Return the same bytes for equal tables, whatever their scopes."""
        return _digest(self.cost, self.forbidden, self.amounts)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Nodes and all tables between them.

    Parameters
    ----------
    nodes
        Original indices, in the order of :func:`formulations.presolve.workspace.canonical_order.canonical_order`.
    intervals
        All on which they use something, ascending; the columns of amounts.
    cost, amounts
        Per node the cost of its strategies, at least 0, and what they use, shape ``(strategies, intervals)``.
    couplings
        The tables.
    covers
        Whether an interval (first axis) contains a segment between neighbouring ends of intervals, 0 or 1.
    least_cost
        What was taken off the nodes' costs, in all.
    """

    nodes: tuple[int, ...]
    intervals: tuple[Interval, ...]
    cost: tuple[Integers, ...]
    amounts: tuple[Integers, ...]
    couplings: tuple[Coupling, ...]
    covers: IntArray
    least_cost: int

    @classmethod
    def of(cls, work: Workspace, nodes: Sequence[int]) -> Part:
        """Read some nodes, whose tables must not reach beyond them."""
        place = {node: k for k, node in enumerate(nodes)}
        intervals = tuple(sorted({interval for usage in _usages(work, nodes) for interval in usage}))
        least = [int(work.cost[i].min()) for i in nodes]
        cost = [work.cost[i] - low for i, low in zip(nodes, least, strict=True)]
        amounts = [_columns(work, work.usage[i], intervals, work.cost[i].shape) for i in nodes]
        couplings = [
            _coupling(work, tuple(place[i] for i in scope), work.tables[scope], intervals)
            for scope in _scopes(work, nodes)
        ]
        order = _order(cost, amounts, couplings)
        new_place = sorted(range(len(order)), key=order.__getitem__)
        return cls(
            tuple(nodes[k] for k in order),
            intervals,
            tuple(cost[k] for k in order),
            tuple(amounts[k] for k in order),
            tuple(sorted((coupling.placed(new_place) for coupling in couplings), key=lambda coupling: coupling.scope)),
            _covers(intervals),
            sum(least),
        )

    @property
    def cost_entries(self) -> int:
        """Number of costs of all strategies and combinations."""
        return sum(cost.size for cost in self.cost) + sum(coupling.cost.size for coupling in self.couplings)

    def digest(self) -> bytes:
        """Return the same bytes only for parts that agree in all arrays, and so have the same front."""
        tables = [(coupling.cost, coupling.forbidden, coupling.amounts) for coupling in self.couplings]
        content = _digest(self.covers, *self.cost, *self.amounts, *(array for table in tables for array in table))
        return content + repr([coupling.scope for coupling in self.couplings]).encode()


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """The joint choices of a part that no other beats: what the rest of the problem sees of it.

    Parameters
    ----------
    cost, amounts
        Per joint choice, as in :class:`Part`.
    order
        Places of the nodes in the order in which they were decided.
    choices
        Places of the nodes' strategies, shape ``(joint choices, nodes)``, nodes in that order.
    steps
        See :class:`formulations.presolve.workspace.lift.Merged`.
    """

    cost: Integers
    amounts: Integers
    order: tuple[int, ...]
    choices: IntArray
    steps: tuple[IntArray, ...]


def components(work: Workspace) -> list[list[int]]:
    """Return the connected components of the living nodes, each ascending, in the order of their first nodes."""
    seen: set[int] = set()
    found = []
    for start in work.living():
        if start in seen:
            continue
        seen.add(start)
        component = [start]
        for node in component:
            for scope in work.incident[node]:
                fresh = [i for i in scope if i not in seen]
                seen.update(fresh)
                component += fresh
        found.append(sorted(component))
    return found


def is_worth_a_round(candidates: int, living: int) -> bool:
    """Return whether so many nodes may be worth it: after a success all reductions look at all nodes once more."""
    return candidates > WORTHWHILE_SHARE * living


def interval_count(work: Workspace, nodes: Sequence[int]) -> int:
    """Return on how many intervals some nodes and their tables use something."""
    return len({interval for usage in _usages(work, nodes) for interval in usage})


def usage_entries(work: Workspace, nodes: Sequence[int]) -> int:
    """Return the number of amounts of some nodes and their tables."""
    return sum(amount.size for usage in _usages(work, nodes) for amount in usage.values())


def merge(work: Workspace, part: Part, front: Front) -> int:
    """Put one node with the front's joint choices in the place of a part; return its index."""
    nodes = tuple(part.nodes[k] for k in front.order)
    strategies = tuple(work.strategies[i] for i in nodes)
    chosen = np.stack([kept[place] for kept, place in zip(strategies, front.choices.T, strict=True)], axis=1)
    work.follows.append(Merged(nodes, strategies, front.steps, chosen))
    for scope in _scopes(work, nodes):
        work.pop_table(scope)
    bearer, *others = nodes
    for i in others:
        work.alive[i] = False
    work.strategies[bearer] = np.arange(len(chosen), dtype=np.int64)
    work.cost[bearer] = front.cost + part.least_cost
    columns = zip(part.intervals, front.amounts.T, strict=True)
    work.usage[bearer] = {interval: np.ascontiguousarray(column) for interval, column in columns if column.any()}
    work.touched.add(bearer)
    return bearer


def _scopes(work: Workspace, nodes: Sequence[int]) -> list[Scope]:
    return list(dict.fromkeys(scope for i in nodes for scope in work.incident[i]))


def _usages(work: Workspace, nodes: Sequence[int]) -> list[Usage]:
    return [work.usage[i] for i in nodes] + [work.tables[scope].usage for scope in _scopes(work, nodes)]


def _coupling(work: Workspace, scope: Scope, table: Table, intervals: Sequence[Interval]) -> Coupling:
    return Coupling(scope, table.cost, table.forbidden, _columns(work, table.usage, intervals, table.cost.shape))


def _columns(work: Workspace, usage: Usage, intervals: Sequence[Interval], shape: tuple[int, ...]) -> Integers:
    found = np.zeros((*shape, len(intervals)), dtype=work.amount_type)
    for column, interval in enumerate(intervals):
        if interval in usage:
            found[..., column] = usage[interval]
    return found


def _order(cost: Sequence[Integers], amounts: Sequence[Integers], couplings: Sequence[Coupling]) -> list[int]:
    """Return an order of a part's nodes that depends on their content alone, as far as that tells them apart."""
    if len(cost) == 1:
        return [0]
    content = [_digest(*own) for own in zip(cost, amounts, strict=True)]
    views: list[list[View]] = [[] for _ in content]
    for coupling in couplings:
        for axes in itertools.permutations(range(len(coupling.scope))):
            node, *others = (coupling.scope[axis] for axis in axes)
            views[node].append((coupling.turned(axes, ()).content(), tuple(others)))
    return canonical_order(content, views)


def _covers(intervals: Sequence[Interval]) -> IntArray:
    ends = {(resource, t) for resource, *interval in intervals for t in interval}
    segments = [
        [resource == begin[0] and start <= begin[1] < end for resource, start, end in intervals]
        for begin, following in itertools.pairwise(sorted(ends))
        if begin[0] == following[0]
    ]
    return np.array(segments, dtype=np.int64).reshape(len(segments), len(intervals)).T


def _digest(*arrays: Any) -> bytes:
    """Return 32 bytes that are the same for equal arrays only (SHA-256); an array may be None."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(_bytes(array))
    return found.digest()


def _bytes(array: Any) -> bytes:
    """Return what an array holds; Python integers lie elsewhere than in their array."""
    if array is None:
        return b"none"
    content = repr(array.tolist()).encode() if array.dtype == np.object_ else np.ascontiguousarray(array).tobytes()
    return repr((array.shape, array.dtype.str)).encode() + content
