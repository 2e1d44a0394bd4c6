"""Connected parts of the problem that use no memory are independent problems: narrow ones are solved at once."""

from __future__ import annotations

import numpy as np

from formulations.presolve.workspace.component_parts import components
from formulations.presolve.workspace.state import Workspace
from formulations.presolve.workspace.tunables import FREE_ENTRIES


def reduce(work: Workspace) -> bool:
    """Fix every memory-free narrow component at its optimum; return whether there was any."""
    changed = False
    for component in components(work):
        if work.out_of_time():
            break
        if not any(work.uses_memory(i) for i in component):
            changed |= _solve(work, component)
        if work.contradiction:
            return True
    return changed


def _solve(work: Workspace, component: list[int]) -> bool:
    # Here, because solvers import presolve.
    from formulations.encodings.elimination import CostTable, OutOfTimeError, TooWideError, elimination_order, minimise

    place = {node: k for k, node in enumerate(component)}
    sizes = [len(work.strategies[i]) for i in component]
    scopes = list(dict.fromkeys(scope for i in component for scope in work.incident[i]))
    local = [tuple(place[i] for i in scope) for scope in scopes]
    try:
        if elimination_order(sizes, local)[2] > FREE_ENTRIES:
            return False
    except TooWideError:
        return False
    tables = [CostTable((k,), work.cost[i]) for k, i in enumerate(component)]
    for scope, own in zip(scopes, local, strict=True):
        tables.append(CostTable(own, work.tables[scope].cost, work.tables[scope].forbidden))
    try:
        found = minimise(sizes, tables, work.deadline)
    except OutOfTimeError:
        return False
    if found is None:
        work.contradiction = f"no allowed combination is left around node {work.names[component[0]]}"
        return True
    cost, choices = found
    for scope in scopes:
        work.pop_table(scope)
    for node, choice in zip(component, choices, strict=True):
        work.remove_node(node, (), np.array(choice, dtype=np.int64))
    work.offset += cost
    return True
