"""A few nodes that nothing else is coupled to, as arrays of their own: the same arrays for equal parts.

Costs are counted from each node's least, and intervals are columns whose places in time are forgotten but for
how they overlap. So two layers of a network that differ in when they run, and in what they cost at least, are
equal here, and their fronts are computed once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from formulations.presolve.lift import Merged
from formulations.presolve.workspace import Integers, Interval, Scope, Table, Usage, Workspace
from formulations.problem import BoolArray, IntArray

_LEAST_SHARE = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class Coupling:
    """A table of a part; ``scope`` has places in the part, ``amounts`` one column per interval (last axis)."""

    scope: Scope
    cost: Integers
    forbidden: BoolArray | None
    amounts: Integers


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Nodes and all tables between them.

    Parameters
    ----------
    nodes
        Original indices.
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
        scopes = _scopes(work, nodes)
        intervals = tuple(sorted({interval for usage in _usages(work, nodes) for interval in usage}))
        least = [int(work.cost[i].min()) for i in nodes]
        return cls(
            tuple(nodes),
            intervals,
            tuple(work.cost[i] - low for i, low in zip(nodes, least, strict=True)),
            tuple(_columns(work, work.usage[i], intervals, work.cost[i].shape) for i in nodes),
            tuple(
                _coupling(work, tuple(place[i] for i in scope), work.tables[scope], intervals)
                for scope in sorted(scopes, key=lambda scope: [place[i] for i in scope])
            ),
            _covers(intervals),
            sum(least),
        )

    @property
    def cost_entries(self) -> int:
        """Number of costs of all strategies and combinations."""
        return sum(cost.size for cost in self.cost) + sum(coupling.cost.size for coupling in self.couplings)

    def digest(self) -> bytes:
        """Return the same bytes for parts with the same fronts; nodes in another order may differ."""
        found = hashlib.sha256()
        tables = [(coupling.cost, coupling.amounts, coupling.forbidden) for coupling in self.couplings]
        for array in (self.covers, *self.cost, *self.amounts, *(array for table in tables for array in table)):
            found.update(_bytes(array))
        found.update(repr([coupling.scope for coupling in self.couplings]).encode())
        return found.digest()


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
        See :class:`formulations.presolve.lift.Merged`.
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
    return candidates > _LEAST_SHARE * living


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


def _covers(intervals: Sequence[Interval]) -> IntArray:
    ends = {(resource, t) for resource, *interval in intervals for t in interval}
    segments = [
        [resource == begin[0] and start <= begin[1] < end for resource, start, end in intervals]
        for begin, following in itertools.pairwise(sorted(ends))
        if begin[0] == following[0]
    ]
    return np.array(segments, dtype=np.int64).reshape(len(segments), len(intervals)).T


def _bytes(array: Any) -> bytes:
    """Return what an array holds; Python integers lie elsewhere than in their array."""
    if array is None:
        return b"none"
    content = repr(array.tolist()).encode() if array.dtype == np.object_ else np.ascontiguousarray(array).tobytes()
    return repr((array.shape, array.dtype.str)).encode() + content
