"""Nodes without tables that use memory in the same intervals are one decision: which sums of amounts for what cost.

Two such nodes have as many joint choices as the product of their strategies, but where amounts are multiples of
one another, as those of the layers of a network are, most sums are equal or beaten. Nodes are merged while
their front has fewer strategies than the two together, so that the problem only becomes smaller.
"""

from __future__ import annotations

from formulations.presolve.reductions.component_states import front_of
from formulations.presolve.workspace.component_parts import Part, is_worth_a_round, merge
from formulations.presolve.workspace.state import Interval, Workspace
from formulations.presolve.workspace.tunables import ISOLATED_INTERVALS, ISOLATED_STRATEGIES


def reduce(work: Workspace) -> bool:
    """Merge isolated nodes with equal intervals where that makes the problem smaller; return whether any was."""
    groups: dict[frozenset[Interval], list[int]] = {}
    living = 0
    for node in work.living():
        living += 1
        if not work.incident[node] and 1 <= len(work.usage[node]) <= ISOLATED_INTERVALS:
            groups.setdefault(frozenset(work.usage[node]), []).append(node)
    shared = [nodes for nodes in groups.values() if len(nodes) > 1]
    if not is_worth_a_round(sum(map(len, shared)), living):
        return False
    changed = False
    for nodes in shared:
        changed |= _merge_all(work, nodes)
    return changed


def _merge_all(work: Workspace, nodes: list[int]) -> bool:
    """Merge along the nodes in an order in which equal ones are neighbours."""
    bearer, *others = sorted(nodes, key=lambda node: (Part.of(work, (node,)).digest(), node))
    changed = False
    for node in others:
        if work.out_of_time():
            break
        part = Part.of(work, (bearer, node))
        front = front_of(work, part, min(ISOLATED_STRATEGIES, part.cost_entries - 1))
        if front is None:
            bearer = node
        else:
            bearer = merge(work, part, front)
            changed = True
    return changed
