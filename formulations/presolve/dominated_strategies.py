r"""Strategies that another one of the same node always beats, in cost, memory and what it allows, are dropped.

Strategy ``t`` dominates ``s`` where it uses no more at any time, whatever the neighbours choose, is allowed
wherever ``s`` is, and

.. math:: cost(t) - cost(s) + \sum_f \max_y (cost_f(t, y) - cost_f(s, y)) \le 0

with the maximum over all combinations ``y`` of the neighbours that ``s`` allows.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from formulations.presolve.workspace import Integers, Scope, Table, Usage, Workspace
from formulations.problem import BoolArray

_MOST_COMPARISONS = 1 << 21
_ALL_COMPARISONS = 1 << 31


def reduce(work: Workspace) -> bool:
    """Drop dominated strategies until none is left, or the work runs out; return whether there were any."""
    waiting = deque(i for i in sorted(work.touched) if work.alive[i])
    work.touched.clear()
    queued = set(waiting)
    changed = False
    remaining = _ALL_COMPARISONS
    while waiting and remaining > 0:
        node = waiting.popleft()
        queued.discard(node)
        size = len(work.strategies[node])
        effort = size * (size + sum(work.tables[scope].cost.size for scope in work.incident[node]))
        if size < 2 or effort > _MOST_COMPARISONS:
            continue
        remaining -= effort
        work.touched.discard(node)
        keep = _undominated(work, node)
        if not keep.all():
            work.restrict({node: keep})
            work.touched.discard(node)
            changed = True
            near = sorted({i for scope in work.incident[node] for i in scope} - queued)
            waiting.extend(near)
            queued.update(near)
    return changed


def _undominated(work: Workspace, node: int) -> BoolArray:
    better = _uses_no_more(work.usage[node], len(work.strategies[node]))
    np.fill_diagonal(better, False)
    if not better.any():
        return np.ones(len(better), dtype=np.bool_)
    loss: Integers = work.cost[node][:, None] - work.cost[node][None, :]
    for scope in work.incident[node]:
        worst, possible = _worst_loss(work.tables[scope], scope, node)
        loss = loss + worst
        better &= possible
    better &= np.asarray(loss <= 0, dtype=np.bool_)
    keep = np.ones(len(better), dtype=np.bool_)
    for s in np.flatnonzero(better.any(axis=0)):
        keep[s] = not (better[:, s] & keep).any()
    return keep


def _uses_no_more(usage: Usage, size: int) -> BoolArray:
    """Return whether strategy ``t`` (first axis) never uses more than ``s``, over the segments between events."""
    result = np.ones((size, size), dtype=np.bool_)
    for resource in sorted({key[0] for key in usage}):
        own = [(key[1], key[2], amount) for key, amount in usage.items() if key[0] == resource]
        points = sorted({t for start, end, _ in own for t in (start, end)})
        place = {t: k for k, t in enumerate(points)}
        level = np.zeros((len(points), size), dtype=own[0][2].dtype)
        for start, end, amount in own:
            level[place[start] : place[end]] += amount
        for at_once in level[:-1]:
            result &= np.asarray(at_once[:, None] <= at_once[None, :], dtype=np.bool_)
    return result


def _worst_loss(table: Table, scope: Scope, node: int) -> tuple[Integers, BoolArray]:
    """Return how much worse ``t`` can be than ``s``, and whether it is allowed and fits wherever ``s`` does."""
    axis = scope.index(node)
    size = table.cost.shape[axis]
    cost = np.moveaxis(table.cost, axis, 0).reshape(size, -1)
    difference = cost[:, None, :] - cost[None, :, :]
    possible = np.ones((size, size), dtype=np.bool_)
    if table.forbidden is not None:
        flags = np.moveaxis(table.forbidden, axis, 0).reshape(size, -1)
        possible &= ~(flags[:, None, :] & ~flags[None, :, :]).any(axis=2)
        counted = ~np.broadcast_to(flags[None, :, :], difference.shape)
        least = int(difference.min())
        worst = np.where(counted, difference, least).max(axis=2)
    else:
        worst = difference.max(axis=2)
    for amount in table.usage.values():
        used = np.moveaxis(amount, axis, 0).reshape(size, -1)
        possible &= np.asarray((used[:, None, :] <= used[None, :, :]).all(axis=2), dtype=np.bool_)
    return worst, possible
