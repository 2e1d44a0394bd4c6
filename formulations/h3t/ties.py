"""How many layers may have a switch on among all fastest synchronized plans of an H3T step.

Where communication is hidden behind computation, plans with very different switches take the same time, and which of
them a search returns says nothing. So a share of switches that is to be compared is a range.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from formulations.h3t.exact import solve_synchronized
from formulations.h3t.operations import Switch
from formulations.h3t.problem import H3tError
from formulations.h3t.segments import SYNCHRONIZED_SETS, SegmentTables

__all__ = ["layers_with"]

_TIME = 0


def layers_with(switch: Switch, tables: SegmentTables, memory_limit: int) -> tuple[int, int]:
    """Least and largest number of layers that have a switch on, over all fastest plans within a limit.

    Times are multiplied by more than there are layers, and every layer with the switch on, or off, takes one more.

    Raises
    ------
    H3tError
        No plan fits, or the search gave up.
    """
    return _fewest(switch, True, tables, memory_limit), tables.layers - _fewest(switch, False, tables, memory_limit)


def _fewest(switch: Switch, is_on: bool, tables: SegmentTables, memory_limit: int) -> int:
    scale = tables.layers + 1
    counted = (np.arange(SYNCHRONIZED_SETS) & int(switch) > 0) == is_on
    forward, backward = tables.forward.copy(), tables.backward.copy()
    forward[_TIME] *= scale
    backward[_TIME] *= scale
    scaled = replace(
        tables,
        forward=forward,
        backward=backward,
        reload=tables.reload * scale + counted,
        fixed_cost=tables.fixed_cost * scale,
    )
    found = solve_synchronized(scaled, memory_limit)
    if found.outcome is None or found.outcome.cost != found.bound:
        raise H3tError(
            f"the fastest plans within {memory_limit} bytes are not known, so neither are their switches; allow more"
        )
    return found.outcome.cost % scale
