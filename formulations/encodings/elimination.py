"""Exact minimisation of a sum of tables by bucket elimination (Dechter 1999), in integers.

Nodes are eliminated one after another, each where it makes the smallest table. The effort is exponential in
the width of the graph, which is small (at most about four) for the training steps of transformers.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.problem.strategy_problem import BoolArray

MAX_TABLE_ENTRIES = 1 << 24
MAX_TOTAL_ENTRIES = 1 << 31
_INT64_SAFE_MAGNITUDE = 2**59
_VECTOR_LENGTH = 64


class TooWideError(Exception):
    """The smallest elimination order that was found needs tables beyond the size limit."""


class OutOfTimeError(Exception):
    """The deadline passed during elimination."""


Piece = tuple[tuple[int, ...], NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class CostTable:
    """Costs over the nodes of ``scope`` (one axis each), integers; flags of forbidden entries or None."""

    scope: tuple[int, ...]
    cost: NDArray[Any]
    forbidden: BoolArray | None = None


@dataclass(frozen=True, slots=True)
class Sums:
    """Type in which tables are added up, and the cost that stands for a forbidden entry.

    Parameters
    ----------
    magnitude
        No sum of entries is larger, in either direction.
    dtype
        64-bit integers, or Python's where sums could leave them.
    forbidden
        A sum with it stays above all sums without: costs lower it by ``magnitude`` at most.
    """

    magnitude: int
    dtype: type[Any]
    forbidden: int

    @classmethod
    def of(cls, tables: Sequence[CostTable]) -> Sums:
        """Those of some tables."""
        magnitude = sum(max(int(table.cost.max()), -int(table.cost.min())) for table in tables)
        if magnitude < _INT64_SAFE_MAGNITUDE:
            return cls(magnitude, np.int64, 2 * _INT64_SAFE_MAGNITUDE)
        return cls(magnitude, np.object_, 4 * magnitude)

    def values(self, table: CostTable) -> NDArray[Any]:
        """Entries of a table in this type, forbidden ones included; the table's own array where it has none."""
        values: NDArray[Any] = table.cost.astype(self.dtype, copy=table.forbidden is not None)
        if table.forbidden is not None:
            values[table.forbidden] = self.forbidden
        return values


@dataclass(frozen=True, slots=True, eq=False)
class _Eliminated:
    """An eliminated node: its best strategy for every combination of its later neighbours."""

    node: int
    neighbours: tuple[int, ...]
    best: NDArray[np.int32]


def elimination_order(sizes: Sequence[int], scopes: Sequence[tuple[int, ...]]) -> tuple[list[int], int, int]:
    """Order nodes greedily by the size of the table that eliminating them makes.

    Returns
    -------
    tuple
        The order, the entries of its largest table, and of all its tables together.

    Raises
    ------
    TooWideError
        If the largest table exceeds :data:`MAX_TABLE_ENTRIES` or all exceed :data:`MAX_TOTAL_ENTRIES`.
    """
    neighbours: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        open_nodes = open_axes(sizes, scope)
        for i in open_nodes:
            neighbours[i].update(open_nodes)
    for i, near in enumerate(neighbours):
        near.discard(i)

    def entries(i: int) -> int:
        return math.prod((sizes[j] for j in neighbours[i]), start=sizes[i])

    waiting = [(entries(i), i) for i in range(len(sizes))]
    heapq.heapify(waiting)
    order: list[int] = []
    done = [False] * len(sizes)
    largest, total = 0, 0
    while waiting:
        known, i = heapq.heappop(waiting)
        if done[i]:
            continue
        size = entries(i)
        if size > known:
            heapq.heappush(waiting, (size, i))
            continue
        largest, total = max(largest, size), total + size
        if largest > MAX_TABLE_ENTRIES or total > MAX_TOTAL_ENTRIES:
            raise TooWideError(
                f"after {len(order)} of {len(sizes)} nodes the smallest table has {size} entries and all have "
                f"{total}; the limits are {MAX_TABLE_ENTRIES} and {MAX_TOTAL_ENTRIES}"
            )
        done[i] = True
        order.append(i)
        near = neighbours[i]
        for j in near:
            neighbours[j] |= near
            neighbours[j] -= {i, j}
            heapq.heappush(waiting, (entries(j), j))
    return order, largest, total


def minimise(
    sizes: Sequence[int], tables: Sequence[CostTable], deadline: float = math.inf
) -> tuple[int, tuple[int, ...]] | None:
    """Return the least sum of all tables and an assignment that attains it, or None where all are forbidden.

    Exact for every int64 (or Python integer) cost: where sums could leave int64, tables hold Python integers.

    Parameters
    ----------
    sizes
        Strategies per node.
    tables
        Tables of integers over any nodes; several may share a scope.
    deadline
        Of :func:`time.monotonic`, checked between eliminations.

    Raises
    ------
    TooWideError, OutOfTimeError
    """
    order = elimination_order(sizes, [table.scope for table in tables])[0]
    sums = Sums.of(tables)
    pieces = [(table.scope, sums.values(table)) for table in tables]
    minima, choices = _eliminate(sizes, order, pieces, sums.dtype, sums.forbidden, deadline)
    if any(int(value) > sums.magnitude for value in minima):
        return None
    return sum(int(value) for value in minima), choices


def minimise_floats(
    sizes: Sequence[int],
    order: Sequence[int],
    tables: Sequence[tuple[tuple[int, ...], NDArray[np.float64]]],
    deadline: float = math.inf,
) -> tuple[float, tuple[int, ...]]:
    """Like :func:`minimise`, in floating point and in a given order, for finite tables (scope, costs)."""
    minima, choices = _eliminate(sizes, order, tables, np.float64, math.inf, deadline)
    return float(sum(minima)), choices


def _eliminate(
    sizes: Sequence[int],
    order: Sequence[int],
    tables: Sequence[Piece],
    dtype: type[Any],
    forbidden_cost: float,
    deadline: float,
) -> tuple[list[Any], tuple[int, ...]]:
    """Eliminate all nodes; return the minimum of every component of the graph, and the choices."""
    place = {node: rank for rank, node in enumerate(order)}
    buckets: list[list[Piece]] = [[] for _ in sizes]
    for scope, values in tables:
        kept = open_axes(sizes, scope)
        lean = values.reshape([sizes[i] for i in kept])
        buckets[min(kept, key=place.__getitem__)].append((kept, lean))
    eliminated: list[_Eliminated] = []
    minima: list[Any] = []
    for node in order:
        if time.monotonic() > deadline:
            raise OutOfTimeError(f"{len(eliminated)} of {len(sizes)} nodes eliminated")
        near = tuple(sorted({i for scope, _ in buckets[node] for i in scope if i != node}))
        joint = joined(node, near, sizes, buckets[node], dtype, forbidden_cost)
        buckets[node] = []
        least, best = minimum_over_first(joint)
        eliminated.append(_Eliminated(node, near, best))
        if near:
            buckets[min(near, key=place.__getitem__)].append((near, least))
        else:
            minima.append(least[()])
    choices = [0] * len(sizes)
    for step in reversed(eliminated):
        choices[step.node] = int(step.best[tuple(choices[i] for i in step.neighbours)])
    return minima, tuple(choices)


def open_axes(sizes: Sequence[int], scope: tuple[int, ...]) -> tuple[int, ...]:
    """Nodes of a table that have a choice, at least one node: an array has few axes, and those without cost nothing."""
    return tuple(i for i in scope if sizes[i] > 1) or scope[:1]


def joined(
    node: int,
    near: tuple[int, ...],
    sizes: Sequence[int],
    bucket: list[Piece],
    dtype: type[Any],
    forbidden_cost: float,
) -> NDArray[Any]:
    """Sum of a bucket's tables, the node's axis first; capped so that forbidden entries never add up."""
    axes = (node, *near)
    joint: NDArray[Any] = np.zeros(tuple(sizes[i] for i in axes), dtype=dtype)
    for k, (scope, values) in enumerate(bucket):
        by_axis = sorted(range(len(scope)), key=lambda k: axes.index(scope[k]))
        shape = [sizes[i] if i in scope else 1 for i in axes]
        placed = values.transpose(by_axis).reshape(shape)
        if k == 0:
            joint[:] = placed
            continue
        joint += placed
        if forbidden_cost < math.inf:
            np.minimum(joint, forbidden_cost, out=joint)
    return joint


def minimum_over_first(joint: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Minimum over the first axis and the first strategy that attains it."""
    rest = joint.size // joint.shape[0]
    if rest < _VECTOR_LENGTH:
        best = np.asarray(joint.argmin(axis=0), dtype=np.int32)
        return np.asarray(joint.min(axis=0)), best
    least = joint[0].copy()
    best = np.zeros(joint.shape[1:], dtype=np.int32)
    for s in range(1, joint.shape[0]):
        better = joint[s] < least
        np.copyto(least, joint[s], where=better)
        np.copyto(best, s, where=better)
    return least, best
