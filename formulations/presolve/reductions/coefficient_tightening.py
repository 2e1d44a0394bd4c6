r"""Usage so little that it saves more than a limit asks for counts as what saves just enough.

With :math:`M(t)` the sum over all nodes and tables of their largest usage at a time, a limit :math:`L` asks that the
choices together save :math:`D(t) = M(t) - L` of it. A strategy that saves more than that by itself saves no more than
enough if it saves :math:`D(t)`. So its usage becomes

.. math:: \max(u_i(s, t), \max_{s'} u_i(s', t) - D(t)) ,

which leaves the same assignments feasible and fewer fractional ones (coefficient tightening; Savelsbergh 1994).
"""

from __future__ import annotations

import numpy as np

from formulations.presolve.workspace.levels import Levels, levels_of, reduce_each
from formulations.presolve.workspace.state import Integers, Scope, Usage, Workspace, add_usage


def reduce(work: Workspace) -> bool:
    """Raise usage where that changes nothing; return whether there was any."""
    return reduce_each(work, _reduce)


def _reduce(work: Workspace, resource: int, limit: int) -> bool:
    levels = levels_of(work, resource)
    needed = work.constant_usage[resource] - limit
    for level in levels.values():
        level.add_to(needed, level.least + level.span)
    changed = False
    for scope, level in levels.items():
        more = _increase(level, needed, resource)
        if more:
            add_usage(_usage_of(work, scope), more)
            work.touched.update(scope)
            changed = True
    return changed


def _increase(level: Levels, needed: Integers, resource: int) -> Usage:
    """What is to be added to the usage of a table, per segment; the most that any time of a segment needs counts."""
    allowed = level.span - np.maximum(level.highest(needed), 0)
    increased = np.flatnonzero(allowed > 0).tolist()
    if not increased:
        return {}
    points, excess = level.points.tolist(), level.excess()
    # Every segment has an entry without excess, which falls short of anything that is allowed.
    return {(resource, points[k], points[k + 1]): np.maximum(allowed[k] - excess[k], 0) for k in increased}


def _usage_of(work: Workspace, scope: Scope) -> Usage:
    return work.usage[scope[0]] if len(scope) == 1 else work.tables[scope].usage
