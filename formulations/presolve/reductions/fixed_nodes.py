"""Nodes with one strategy left are no decisions: their tables move to their neighbours."""

from __future__ import annotations

import numpy as np

from formulations.presolve.workspace.state import Workspace


def reduce(work: Workspace) -> bool:
    """Fold every node with one strategy into its neighbours; return whether there was any."""
    waiting = [i for i in work.living() if len(work.strategies[i]) == 1]
    changed = bool(waiting)
    while waiting and not work.contradiction:
        for node in waiting:
            if work.out_of_time():
                return True
            work.remove_forbidden()  # an earlier fold may have forbidden the only strategy
            if work.contradiction:
                return True
            _fold(work, node)
        work.remove_forbidden()
        waiting = [i for i in work.living() if len(work.strategies[i]) == 1]
    return changed


def _fold(work: Workspace, node: int) -> None:
    work.offset += int(work.cost[node][0])
    for (resource, start, end), amount in work.usage[node].items():
        work.constant_usage[resource][start:end] += amount[0]
    for scope in list(work.incident[node]):
        table = work.pop_table(scope)
        rest = tuple(i for i in scope if i != node)
        work.add_table(rest, table.at(tuple(0 if i == node else slice(None) for i in scope)))
    work.remove_node(node, (), np.zeros((), dtype=np.int64))
