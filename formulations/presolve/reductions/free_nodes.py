"""Nodes that use no memory and touch at most two others are minimised out, as in bucket elimination.

The minimum over such a node is a cost of its neighbours: a number, a vector, or a table. A table is made only
where it is not larger than those that it replaces.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.presolve.workspace.state import Scope, Table, Workspace
from formulations.presolve.workspace.tunables import FREE_COMBINATIONS, FREE_NEIGHBOURS
from formulations.problem.strategy_problem import BoolArray, IntArray


def reduce(work: Workspace) -> bool:
    """Eliminate nodes until none is left to eliminate; return whether there were any."""
    waiting = deque(work.living())
    queued = set(waiting)
    changed = False
    while waiting and not work.contradiction and not work.out_of_time():
        node = waiting.popleft()
        queued.discard(node)
        others = _neighbours(work, node)
        if others is None:
            continue
        _eliminate(work, node, others)
        work.remove_forbidden()
        changed = True
        fresh = [i for i in others if i not in queued]
        waiting.extend(fresh)
        queued.update(fresh)
    return changed


def _neighbours(work: Workspace, node: int) -> Scope | None:
    """Return the neighbours of a node that may be eliminated, else None."""
    if not work.alive[node] or len(work.incident[node]) > FREE_NEIGHBOURS + 1 or work.uses_memory(node):
        return None
    others = tuple(sorted({i for scope in work.incident[node] for i in scope} - {node}))
    if len(others) > FREE_NEIGHBOURS:
        return None
    if len(others) == FREE_NEIGHBOURS:
        combinations = int(np.prod([len(work.strategies[i]) for i in others]))
        present = sum(work.tables[scope].cost.size for scope in work.incident[node])
        if combinations * len(work.strategies[node]) > FREE_COMBINATIONS:
            return None
        if combinations > present and others not in work.tables:
            return None
    return others


def _eliminate(work: Workspace, node: int, others: Scope) -> None:
    axes = (node, *others)
    total: NDArray[Any] = work.cost[node].reshape(-1, *[1] * len(others))
    forbidden: BoolArray = np.zeros((1,) * len(axes), dtype=np.bool_)
    for scope in list(work.incident[node]):
        table = work.pop_table(scope)
        order = [scope.index(i) for i in axes if i in scope]
        shape = [len(work.strategies[i]) if i in scope else 1 for i in axes]
        total = total + table.cost.transpose(order).reshape(shape)
        if table.forbidden is not None:
            forbidden = forbidden | table.forbidden.transpose(order).reshape(shape)
    best, least, none_left = _minimum(total, forbidden)
    work.remove_node(node, others, best)
    if others:
        flags = none_left if none_left.any() else None
        work.add_table(others, Table(np.where(none_left, 0, least), flags))
    elif none_left:
        work.contradiction = f"node {work.names[node]}: every strategy is forbidden"
    else:
        work.offset += int(least)


def _minimum(total: NDArray[Any], forbidden: BoolArray) -> tuple[IntArray, NDArray[Any], BoolArray]:
    """Return where the allowed minimum along the first axis is, what it is, and where nothing is allowed."""
    flags = np.broadcast_to(forbidden, total.shape)
    worst = int(total.max()) + 1
    hidden = np.where(flags, worst, total) if forbidden.any() else total
    best: IntArray = np.asarray(hidden.argmin(axis=0), dtype=np.int64)
    return best, np.asarray(hidden.min(axis=0)), np.asarray(flags.all(axis=0), dtype=np.bool_)
