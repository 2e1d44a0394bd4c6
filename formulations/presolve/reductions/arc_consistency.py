"""Strategies that no allowed combination of some table contains are dropped; a worklist of tables, not of nodes."""

from __future__ import annotations

import numpy as np

from formulations.encodings.arc_consistency import propagate
from formulations.presolve.workspace.state import Workspace


def reduce(work: Workspace) -> bool:
    """Drop unsupported strategies until none is left to drop; return whether there were any."""
    masks = {scope: ~table.forbidden for scope, table in work.tables.items() if table.forbidden is not None}
    if not masks:
        return False
    alive = [np.ones(len(strategies), dtype=np.bool_) for strategies in work.strategies]
    emptied = propagate(alive, masks, work.deadline)
    if emptied is not None:
        work.contradiction = f"node {work.names[emptied]}: every strategy is forbidden"
        return True
    return work.restrict({i: alive[i] for scope in masks for i in scope})
