"""Tables that are sums of one vector per node move into the nodes' costs; tables of zeros vanish."""

from __future__ import annotations

import numpy as np

from formulations.presolve.workspace.state import Integers, Table, Workspace


def reduce(work: Workspace) -> bool:
    """Dissolve every separable table; return whether there was any."""
    changed = False
    for scope, table in list(work.tables.items()):
        if work.out_of_time():
            break
        if table.forbidden is not None or table.usage:
            continue
        parts = _split(table.cost)
        if parts is not None:
            work.pop_table(scope)
            for node, part in zip(scope, parts, strict=True):
                work.add_table((node,), Table(part))
            changed = True
    return changed


def _split(cost: Integers) -> list[Integers] | None:
    """Return one vector per axis whose outer sum is ``cost``, or None."""
    corner = cost.flat[0]
    if cost.ndim == 2 and corner + cost[-1, -1] != cost[0, -1] + cost[-1, 0]:
        return None  # most tables fail here already
    parts: list[Integers] = []
    for axis in range(cost.ndim):
        along = cost[tuple(slice(None) if k == axis else 0 for k in range(cost.ndim))]
        parts.append(along if axis == 0 else along - corner)
    total = parts[0]
    for part in parts[1:]:
        total = total[..., None] + part
    return parts if np.array_equal(total, cost) else None
