"""A lower bound on the least sum of tables by bucket elimination in tables of bounded size.

Where eliminating a node would make too large a table, its tables are eliminated in groups, the *mini-buckets*, each of
which may choose the node's strategy anew: the sum of their minima is a lower bound (Dechter and Rish 2003). Before
that, costs are moved between the mini-buckets until all of them have the same minima over the node's strategies, which
closes most of the gap (Ihler, Flerova, Dechter and Otten 2012). All of it is in exact integers.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.elimination import (
    CostTable,
    OutOfTimeError,
    Piece,
    Sums,
    joined,
    open_axes,
)

_SAFE_SUM = 2.0**60
"""Sums of this size and twice it fit 64 bits."""


class _OutOfRangeError(Exception):
    """Sums may leave 64 bits."""


def least_sum_bound(
    sizes: Sequence[int], tables: list[CostTable], most_entries: int, deadline: float = math.inf
) -> int | None:
    """Return a lower bound on the least sum of all tables, or None.

    None shows that every choice is forbidden, or that sums may leave 64 bits.

    Parameters
    ----------
    sizes
        Strategies per node.
    tables
        Tables of integers over any nodes; several may share a scope. The list is emptied, so that what is eliminated
        does not stay in memory.
    most_entries
        Entries of the largest table that is made, unless a given one is larger.
    deadline
        Of :func:`time.monotonic`, checked between eliminations.

    Raises
    ------
    OutOfTimeError
        At the deadline.
    """
    sums = Sums.of(tables)
    buckets = _Buckets(sizes, most_entries, sums)
    tables.reverse()
    while tables:
        table = tables.pop()
        kept = open_axes(sizes, table.scope)
        buckets.add(kept, sums.values(table).reshape([sizes[i] for i in kept]))
    try:
        return buckets.eliminate(deadline)
    except _OutOfRangeError:
        return None


class _Buckets:
    """Tables by the nodes in their scopes; those without a node left are sums of the bound."""

    def __init__(self, sizes: Sequence[int], most_entries: int, sums: Sums) -> None:
        self.sizes, self.most_entries = sizes, most_entries
        self.dtype, self.magnitude, self.forbidden = sums.dtype, sums.magnitude, sums.forbidden
        self.minima: list[int] = []
        self._pieces: dict[int, Piece] = {}
        self._of_node: list[set[int]] = [set() for _ in sizes]
        self._added = 0

    def add(self, scope: tuple[int, ...], values: NDArray[Any]) -> None:
        """Add a table."""
        if not scope:
            self.minima.append(int(values[()]))
            return
        self._pieces[self._added] = scope, values
        for i in scope:
            self._of_node[i].add(self._added)
        self._added += 1

    def eliminate(self, deadline: float) -> int | None:
        """Eliminate all nodes, each where it makes the smallest table, and return the bound."""
        waiting = [(self._entries(i), i) for i in range(len(self.sizes))]
        heapq.heapify(waiting)
        left = set(range(len(self.sizes)))
        while waiting:
            known, i = heapq.heappop(waiting)
            if i not in left:
                continue
            entries = self._entries(i)
            if entries > known:
                heapq.heappush(waiting, (entries, i))
                continue
            if time.monotonic() > deadline:
                raise OutOfTimeError(f"{len(left)} of {len(self.sizes)} nodes are left to eliminate")
            left.discard(i)
            for j in self._eliminate_node(i):
                heapq.heappush(waiting, (self._entries(j), j))
        return None if any(least > self.magnitude for least in self.minima) else sum(self.minima)

    def _entries(self, node: int) -> int:
        """Entries of the joint table of a node."""
        scope = {i for piece in self._of_node[node] for i in self._pieces[piece][0]}
        return math.prod(self.sizes[i] for i in scope)

    def _eliminate_node(self, node: int) -> set[int]:
        """Replace a node's tables by their minima, and return the nodes of those."""
        pieces = [self._take(piece) for piece in sorted(self._of_node[node])]
        # Sums of tables are capped from above, and must not fall out of the range either.
        if self.dtype is np.int64 and sum(min(0.0, float(values.min())) for _, values in pieces) <= -_SAFE_SUM:
            raise _OutOfRangeError
        groups = self._mini_buckets(pieces)
        scopes = [tuple(sorted({i for scope, _ in group for i in scope if i != node})) for group in groups]
        joints = [
            joined(node, near, self.sizes, group, self.dtype, self.forbidden)
            for near, group in zip(scopes, groups, strict=True)
        ]
        if len(joints) > 1:
            self._level(joints)
        for near, joint in zip(scopes, joints, strict=True):
            self.add(near, np.asarray(joint.min(axis=0)))
        return {i for near in scopes for i in near}

    def _take(self, piece: int) -> Piece:
        scope, values = self._pieces.pop(piece)
        for i in scope:
            self._of_node[i].discard(piece)
        return scope, values

    def _mini_buckets(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Groups of tables whose joint table is small enough, the largest tables first."""
        groups: list[tuple[set[int], list[Piece]]] = []
        for scope, values in sorted(pieces, key=lambda piece: -piece[1].size):
            for nodes, group in groups:
                if math.prod(self.sizes[i] for i in nodes.union(scope)) <= self.most_entries:
                    nodes.update(scope)
                    group.append((scope, values))
                    break
            else:
                groups.append((set(scope), [(scope, values)]))
        return [group for _, group in groups]

    def _level(self, joints: list[NDArray[Any]]) -> None:
        """Move costs between joint tables so that each has the same minimum for a strategy of the node.

        What is moved sums to zero for every strategy. Nothing is moved for one that may be forbidden, nor where sums
        could leave the range of the type: any moves, none included, leave the bound valid.
        """
        least = [joint.reshape(joint.shape[0], -1).min(axis=1) for joint in joints]
        may_move = np.all([low <= self.magnitude for low in least], axis=0)
        extent = sum(np.abs(np.where(may_move, low, 0).astype(np.float64)) for low in least)
        if self.dtype is np.int64 and float(np.max(extent)) >= _SAFE_SUM:
            return
        total = sum(least[1:], start=least[0])
        share = total // len(joints)
        targets = [total - (len(joints) - 1) * share, *[share] * (len(joints) - 1)]
        for joint, low, target in zip(joints, least, targets, strict=True):
            moved = np.where(may_move, target - low, 0)
            if moved.any():
                joint += moved.reshape(-1, *[1] * (joint.ndim - 1))
                np.minimum(joint, self.forbidden, out=joint)
