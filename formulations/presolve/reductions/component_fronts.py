"""Small components are seen from outside only as what they cost and use: their fronts become single nodes.

A joint choice that costs no less and uses no less at any time than another one of its component is never needed
(Pareto dominance), and no table reaches out of a component. So one node whose strategies are the others
stands for it exactly. Equal components share the computation.
"""

from __future__ import annotations

from formulations.presolve.reductions.component_states import front_of
from formulations.presolve.workspace.component_parts import (
    Part,
    components,
    interval_count,
    is_worth_a_round,
    merge,
    usage_entries,
)
from formulations.presolve.workspace.state import Workspace
from formulations.presolve.workspace.tunables import COMPONENT_INTERVALS, COMPONENT_NODES, COMPONENT_STRATEGIES


def reduce(work: Workspace) -> bool:
    """Replace small components that use memory where that makes the problem smaller; return whether any was."""
    parts = components(work)
    found = [
        component
        for component in parts
        if 2 <= len(component) <= COMPONENT_NODES and 1 <= interval_count(work, component) <= COMPONENT_INTERVALS
    ]
    if not is_worth_a_round(sum(map(len, found)), sum(map(len, parts))):
        return False
    changed = False
    for component in found:
        changed |= _replace(work, component)
        if work.contradiction or work.out_of_time():
            break
    return changed


def _replace(work: Workspace, component: list[int]) -> bool:
    part = Part.of(work, component)
    front = front_of(work, part, min(COMPONENT_STRATEGIES, part.cost_entries))
    if front is None or front.amounts.size > usage_entries(work, component):
        return False
    if not len(front.cost):
        work.contradiction = f"no allowed combination is left around node {work.names[component[0]]}"
        return True
    merge(work, part, front)
    return True
