"""Nodes tied by forbidden combinations become one decision.

Where each strategy of one node allows exactly one strategy of another, the other follows: its cost, usage and
tables move to the leader. Ties of a whole region are composed first, so that each table is rewritten once a pass.
"""

from __future__ import annotations

import numpy as np

from formulations.presolve.workspace.state import Scope, Table, Workspace, add_usage
from formulations.problem.strategy_problem import BoolArray, IntArray


def reduce(work: Workspace) -> bool:
    """Merge tied nodes in one pass; return whether there were any.

    Expects that every strategy has support in every table (arc consistency); other tables are left alone.
    """
    leaders: dict[int, tuple[int, IntArray]] = {}
    roots: dict[int, int] = {}
    for scope, table in work.tables.items():
        if work.out_of_time():
            break
        if len(scope) == 2 and table.forbidden is not None:
            _tie(leaders, roots, scope, ~table.forbidden)
    resolved = {node: _leader(leaders, node) for node in leaders}
    for node, (leader, follows) in resolved.items():
        work.cost[leader] = work.cost[leader] + work.cost[node][follows]
        add_usage(work.usage[leader], {key: amount[follows] for key, amount in work.usage[node].items()})
        work.remove_node(node, (leader,), follows)
    scopes = dict.fromkeys(scope for node in resolved for scope in work.incident[node])
    for scope in scopes:
        _rewrite(work, scope, resolved)
    work.remove_forbidden()
    return bool(resolved)


def _tie(leaders: dict[int, tuple[int, IntArray]], roots: dict[int, int], scope: Scope, allowed: BoolArray) -> None:
    """Enter a tie where the follower does not follow anyone yet and the leader does not follow it."""
    first, second = scope
    by_first, by_second = allowed.sum(axis=1), allowed.sum(axis=0)
    one_each_for_first = by_first.min() == 1 == by_first.max()
    one_each_for_second = by_second.min() == 1 == by_second.max()
    if one_each_for_first and second not in leaders:
        leader, follows, follower = first, allowed.argmax(axis=1), second
    elif one_each_for_second and first not in leaders:
        leader, follows, follower = second, allowed.argmax(axis=0), first
    else:
        return
    if _root(roots, leader) != follower:
        leaders[follower] = (leader, follows)
        roots[follower] = leader


def _root(roots: dict[int, int], node: int) -> int:
    """Return who leads a node in the end; halves the way on the way."""
    while node in roots:
        above = roots[node]
        if above in roots:
            roots[node] = roots[above]
        node = above
    return node


def _leader(leaders: dict[int, tuple[int, IntArray]], node: int) -> tuple[int, IntArray]:
    """Return the last leader of a node and what the node does per strategy of it; shortens the chain."""
    chain = [node]
    while leaders[chain[-1]][0] in leaders:
        chain.append(leaders[chain[-1]][0])
    top, follows = leaders[chain[-1]]
    for member in reversed(chain[:-1]):
        follows = leaders[member][1][follows]
        leaders[member] = (top, follows)
    return leaders[node]


def _rewrite(work: Workspace, scope: Scope, resolved: dict[int, tuple[int, IntArray]]) -> None:
    """Express a table in the strategies of leaders; two nodes with one leader leave a diagonal."""
    table = work.pop_table(scope)
    leaders = [resolved[i][0] if i in resolved else i for i in scope]
    target = tuple(sorted(set(leaders)))
    index = []
    for node, leader, size in zip(scope, leaders, table.cost.shape, strict=True):
        follows = resolved[node][1] if node in resolved else np.arange(size)
        shape = [1] * len(target)
        shape[target.index(leader)] = -1
        index.append(follows.reshape(shape))
    work.add_table(target, _without_zeros(table.at(tuple(index))))


def _without_zeros(table: Table) -> Table:
    usage = {key: amount for key, amount in table.usage.items() if amount.any()}
    return Table(table.cost, table.forbidden, usage)
