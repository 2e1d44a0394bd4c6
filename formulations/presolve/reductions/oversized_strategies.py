"""Strategies and combinations that fit nowhere: beside the least that all others use, they exceed a limit.

With the slack of a time (its limit less the least usage of every node and table), a strategy is dropped where at some
time it uses more beyond its own node's least than the slack. Combinations of tables are judged alike and forbidden.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from formulations.presolve.workspace.state import Integers, Table, Usage, Workspace
from formulations.problem.strategy_problem import BoolArray

Term = tuple[int, int, Integers]
"""Start, end and amounts."""


def reduce(work: Workspace) -> bool:
    """Drop what fits nowhere; return whether there was any."""
    changed = False
    for resource, limit in enumerate(work.limits):
        if limit is not None and not work.contradiction and not work.out_of_time():
            changed |= _reduce(work, resource, limit)
    return changed


def _reduce(work: Workspace, resource: int, limit: int) -> bool:
    nodes = {i: terms for i in work.living() if (terms := _terms(work.usage[i], resource))}
    tables = {s: terms for s, table in work.tables.items() if (terms := _terms(table.usage, resource))}
    slack = limit - work.constant_usage[resource]
    for terms in (*nodes.values(), *tables.values()):
        for start, end, amount in terms:
            slack[start:end] -= amount.min()
    if not len(slack):
        return False
    least_slack = slack.min()
    if least_slack < 0:
        work.contradiction = f"the least usage of resource {resource} is over its limit by {-int(least_slack)}"
        return True
    forbidden = False
    for scope, terms in tables.items():
        over, table = _oversized(terms, slack, least_slack), work.tables[scope]
        if over is not None and table.forbidden is not None:
            over &= ~table.forbidden
        if over is not None and over.any():
            work.tables[scope] = _without(table, over)
            work.touched.update(scope)
            forbidden = True
    keep = {i: ~over for i, terms in nodes.items() if (over := _oversized(terms, slack, least_slack)) is not None}
    return work.restrict(keep) or forbidden


def _terms(usage: Usage, resource: int) -> list[Term]:
    return [(start, end, amount) for (own, start, end), amount in usage.items() if own == resource]


def _oversized(terms: list[Term], slack: Integers, least_slack: int) -> BoolArray | None:
    """Return flags of the entries that use more than the slack beyond the least of their terms, or None."""
    excess = [(start, end, amount - amount.min()) for start, end, amount in terms]
    if sum(int(amount.max()) for _, _, amount in excess) <= least_slack:
        return None
    over = np.zeros(excess[0][2].shape, dtype=np.bool_)
    points = sorted({time for start, end, _ in excess for time in (start, end)})
    for begin, past in itertools.pairwise(points):
        level = sum(amount for start, end, amount in excess if start <= begin and past <= end)
        over |= np.asarray(level > slack[begin:past].min(), dtype=np.bool_)
    return over if over.any() else None


def _without(table: Table, over: BoolArray) -> Table:
    """Forbid entries; their amounts become the least of what is left, so that they count no more."""
    forbidden = over if table.forbidden is None else table.forbidden | over
    kept = ~forbidden
    usage = table.usage
    if kept.any():
        usage = {key: np.where(forbidden, amount[kept].min(), amount) for key, amount in usage.items()}
    return replace(table, cost=np.where(forbidden, 0, table.cost), forbidden=forbidden, usage=usage)
