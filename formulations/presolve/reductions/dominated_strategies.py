r"""Strategies that another one of the same node always beats, in cost, memory and what it allows, are dropped.

Strategy ``t`` dominates ``s`` where it uses no more at any time, whatever the neighbours choose, is allowed
wherever ``s`` is, and

.. math:: cost(t) - cost(s) + \sum_f \max_y (cost_f(t, y) - cost_f(s, y)) \le 0

with the maximum over all combinations ``y`` of the neighbours that ``s`` allows.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.presolve.workspace.state import Integers, Table, Usage, Workspace
from formulations.presolve.workspace.tunables import DOMINANCE_OF_A_NODE
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray


def reduce(work: Workspace) -> bool:
    """Drop dominated strategies until none is left, or the time is over; return whether there were any."""
    waiting = deque(i for i in sorted(work.touched) if work.alive[i])
    work.touched.clear()
    queued = set(waiting)
    changed = False
    while waiting and not work.out_of_time():
        node = waiting.popleft()
        queued.discard(node)
        size = len(work.strategies[node])
        effort = size * (size + sum(work.tables[scope].cost.size for scope in work.incident[node]))
        if size < 2 or effort > DOMINANCE_OF_A_NODE:
            continue
        work.touched.discard(node)
        keep = _undominated(work, node)
        if not keep.all():
            work.restrict({node: keep})
            work.touched.discard(node)
            changed = True
            near = sorted({i for scope in work.incident[node] for i in scope} - queued)
            waiting.extend(near)
            queued.update(near)
    work.touched.update(waiting)
    return changed


def _undominated(work: Workspace, node: int) -> BoolArray:
    better = _uses_no_more(work.usage[node], len(work.strategies[node]))
    np.fill_diagonal(better, False)
    if not better.any():
        return np.ones(len(better), dtype=np.bool_)
    loss: Integers = work.cost[node][:, None] - work.cost[node][None, :]
    for scope in work.incident[node]:
        _add_worst_loss(work.tables[scope], scope.index(node), loss, better)
        if not better.any():
            break
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


def _add_worst_loss(table: Table, axis: int, loss: Integers, better: BoolArray) -> None:
    """Add how much worse ``t`` can be than ``s``; clear ``better`` where it is not allowed or does not fit."""
    cost = _rows(table.cost, axis)
    flags = np.zeros((0, 0), np.bool_) if table.forbidden is None else _rows(table.forbidden, axis)
    if cost.dtype == np.int64:
        add_worst_loss(cost, flags, loss, better)
    else:
        add_worst_loss.py_func(cost, flags, loss, better)  # type: ignore[attr-defined]
    for amount in table.usage.values():
        used = _rows(amount, axis)
        better &= np.asarray((used[:, None, :] <= used[None, :, :]).all(axis=2), dtype=np.bool_)


def _rows(values: NDArray[Any], axis: int) -> NDArray[Any]:
    """Return a copy with one row per strategy of the node on an axis."""
    if axis:
        values = values.T if values.ndim == 2 else np.moveaxis(values, axis, 0)
    return np.array(values, order="C").reshape(len(values), -1)


@compiled
def add_worst_loss(cost: Integers, flags: BoolArray, loss: Integers, better: BoolArray) -> None:
    """Add the largest ``cost[t] - cost[s]`` where ``s`` is allowed to ``loss``, for pairs with ``better``.

    Parameters
    ----------
    cost
        One row per strategy, one column per combination of the other nodes.
    flags
        What is forbidden, or empty where nothing is; ``t`` is then no longer better where it forbids more.
    loss, better
        Shape ``(strategies, strategies)``, changed in place.
    """
    size, columns = cost.shape
    for t in range(size):
        for s in range(size):
            if not better[t, s]:
                continue
            if len(flags):
                worst, counted = cost[t, 0] - cost[s, 0], False
                for y in range(columns):
                    if not flags[s, y]:
                        better[t, s] = better[t, s] and not flags[t, y]
                        difference = cost[t, y] - cost[s, y]
                        worst = difference if not counted else max(worst, difference)
                        counted = True
            else:
                worst = cost[t, 0] - cost[s, 0]
                for y in range(columns):
                    worst = max(worst, cost[t, y] - cost[s, y])
            loss[t, s] += worst
