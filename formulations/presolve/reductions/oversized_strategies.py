"""Strategies and combinations that fit nowhere: beside the least that all others use, they exceed a limit.

The slack of a time is its limit less the least usage of every node and table then. A strategy is dropped where at some
time it uses more beyond its own node's least than the slack. Combinations of tables are judged alike and forbidden.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from formulations.presolve.workspace.levels import levels_of, reduce_each
from formulations.presolve.workspace.state import Table, Workspace
from formulations.problem.strategy_problem import BoolArray


def reduce(work: Workspace) -> bool:
    """Drop what fits nowhere; return whether there was any."""
    return reduce_each(work, _reduce)


def _reduce(work: Workspace, resource: int, limit: int) -> bool:
    levels = levels_of(work, resource)
    slack = limit - work.constant_usage[resource]
    for level in levels.values():
        level.add_to(slack, -level.least)
    if not levels:
        return False
    if slack.min() < 0:
        work.contradiction = f"the least usage of resource {resource} is over its limit by {-int(slack.min())}"
        return True
    forbidden = False
    keep: dict[int, BoolArray] = {}
    for scope, level in levels.items():
        over = level.beyond(slack)
        if over is None:
            continue
        if len(scope) == 1:
            keep[scope[0]] = ~over
            continue
        table = work.tables[scope]
        if table.forbidden is not None:
            over &= ~table.forbidden
        if over.any():
            work.tables[scope] = _without(table, over)
            work.touched.update(scope)
            forbidden = True
    return work.restrict(keep) or forbidden


def _without(table: Table, over: BoolArray) -> Table:
    """Forbid entries; their amounts become the least of what is left, so that they count no more."""
    forbidden = over if table.forbidden is None else table.forbidden | over
    kept = ~forbidden
    usage = table.usage
    if kept.any():
        usage = {key: np.where(forbidden, amount[kept].min(), amount) for key, amount in usage.items()}
    return replace(table, cost=np.where(forbidden, 0, table.cost), forbidden=forbidden, usage=usage)
