"""Only times that matter: those that no neighbour implies, and at which some choice can exceed the limit.

A time is implied by a neighbour unless usage may rise at it and may fall at the next event. The times that
remain are renumbered per resource; what a table uses in any case becomes constant.
"""

from __future__ import annotations

import numpy as np

from formulations.presolve.workspace import Integers, Interval, Usage, Workspace, add_usage
from formulations.problem import IntArray


def reduce(work: Workspace) -> bool:
    """Renumber times and take out constant usage; return whether anything became smaller."""
    changed = False
    for resource, limit in enumerate(work.limits):
        if limit is not None:
            changed |= _renumber(work, resource, limit)
    return changed


def _renumber(work: Workspace, resource: int, limit: int) -> bool:
    changed = _take_out_constants(work, resource)
    owners = _owners(work, resource)
    intervals = [key for usage in owners for key in usage if key[0] == resource]
    most = [int(amount.max()) for usage in owners for key, amount in usage.items() if key[0] == resource]
    constant = work.constant_usage[resource]
    if work.check_constant_usage():
        return True
    times = _binding_times(intervals, np.array(most, dtype=work.amount_type), constant, limit)
    if len(times) == work.horizons[resource]:
        return changed
    for usage in owners:
        _move(usage, resource, times)
    work.constant_usage[resource] = constant[times]
    work.horizons[resource] = len(times)
    return True


def _owners(work: Workspace, resource: int) -> list[Usage]:
    usages = [work.usage[i] for i in work.living()] + [table.usage for table in work.tables.values()]
    return [usage for usage in usages if any(key[0] == resource for key in usage)]


def _take_out_constants(work: Workspace, resource: int) -> bool:
    constant = work.constant_usage[resource]
    changed = False
    for usage in _owners(work, resource):
        for key, amount in list(usage.items()):
            if key[0] != resource:
                continue
            least = int(amount.min())
            if least:
                constant[key[1] : key[2]] += least
                usage[key] = amount = amount - least
                changed = True
            if not amount.any():
                del usage[key]
    return changed


def _binding_times(intervals: list[Interval], most: Integers, constant: Integers, limit: int) -> IntArray:
    starts = np.array([key[1] for key in intervals], dtype=np.int64)
    ends = np.array([key[2] for key in intervals], dtype=np.int64)
    change = np.zeros(len(constant) + 1, dtype=most.dtype)
    np.add.at(change, starts, most)
    np.subtract.at(change, ends, most)
    usage = np.cumsum(change)[: len(constant)] + constant
    step = np.diff(constant)
    up = np.union1d(starts, np.flatnonzero(step > 0) + 1)
    down = np.union1d(ends, np.flatnonzero(step < 0) + 1)
    # Time zero begins and the horizon ends what is constant.
    up, down = np.union1d(up, [0]), np.union1d(down, [len(constant)])
    events = np.union1d(up, down)
    up = up[up < len(constant)]
    following = events[np.searchsorted(events, up, side="right")]
    candidates = up[np.isin(following, down)]
    return candidates[np.asarray(usage[candidates] > limit, dtype=np.bool_)].astype(np.int64)


def _move(usage: Usage, resource: int, times: IntArray) -> None:
    """Write the intervals of one resource in numbers of ``times``; those without a time are dropped."""
    keys = [key for key in usage if key[0] == resource]
    bounds = np.searchsorted(times, np.array([key[1:] for key in keys], dtype=np.int64)).tolist()
    moved: Usage = {}
    for key, (start, end) in zip(keys, bounds, strict=True):
        amount = usage.pop(key)
        if start < end:
            add_usage(moved, {(resource, start, end): amount})
    usage.update(moved)
