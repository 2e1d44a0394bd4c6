"""Only times that matter: those that no neighbour implies, and at which some choice can exceed the limit.

A time is implied by a neighbour unless usage may rise at it and may fall at the next event. The times that
remain are renumbered per resource; what a table uses in any case becomes constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from formulations.presolve.workspace.levels import reduce_each
from formulations.presolve.workspace.state import Integers, Usage, Workspace
from formulations.problem.strategy_problem import BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Terms:
    """The terms of one resource: term ``q`` of owner ``owner[q]`` uses ``amounts[bounds[q]:bounds[q + 1]]``."""

    owner: IntArray
    starts: IntArray
    ends: IntArray
    bounds: IntArray
    amounts: Integers

    @classmethod
    def of(cls, owners: list[Usage], resource: int, dtype: type) -> _Terms:
        found = [(k, key, amount) for k, usage in enumerate(owners) for key, amount in usage.items()]
        found = [entry for entry in found if entry[1][0] == resource]
        owner = np.array([k for k, _, _ in found], dtype=np.int64)
        intervals = np.array([key[1:] for _, key, _ in found], dtype=np.int64).reshape(-1, 2)
        amounts = np.concatenate([np.zeros(0, dtype=dtype), *(amount.ravel() for _, _, amount in found)])
        bounds = _bounds(np.array([amount.size for _, _, amount in found], dtype=np.int64))
        return cls(owner, intervals[:, 0], intervals[:, 1], bounds, amounts)

    def least(self) -> Integers:
        return np.minimum.reduceat(self.amounts, self.bounds[:-1]) if len(self.owner) else self.amounts

    def most(self) -> Integers:
        return np.maximum.reduceat(self.amounts, self.bounds[:-1]) if len(self.owner) else self.amounts

    def only(self, kept: BoolArray) -> _Terms:
        sizes = np.diff(self.bounds)
        amounts = self.amounts[np.repeat(kept, sizes)]
        return _Terms(self.owner[kept], self.starts[kept], self.ends[kept], _bounds(sizes[kept]), amounts)

    def minus(self, least: Integers) -> _Terms:
        amounts = self.amounts - np.repeat(least, np.diff(self.bounds))
        return _Terms(self.owner, self.starts, self.ends, self.bounds, amounts)

    def renumbered(self, times: IntArray) -> _Terms:
        """Write intervals in numbers of ``times``; those without a time are dropped, equal ones are added up."""
        starts, ends = np.searchsorted(times, self.starts), np.searchsorted(times, self.ends)
        moved = _Terms(self.owner, starts, ends, self.bounds, self.amounts).only(starts < ends)
        order = np.lexsort((moved.ends, moved.starts, moved.owner))
        keys = np.stack([moved.owner[order], moved.starts[order], moved.ends[order]])
        fresh = np.ones(len(order), dtype=np.bool_)
        fresh[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        if fresh.all():
            return moved
        group = np.empty(len(order), dtype=np.int64)
        group[order] = np.cumsum(fresh) - 1
        first = order[fresh]
        sizes = np.diff(moved.bounds)
        bounds = _bounds(sizes[first])
        amounts = np.zeros(int(bounds[-1]), dtype=moved.amounts.dtype)
        place = np.arange(len(moved.amounts)) + np.repeat(bounds[:-1][group] - moved.bounds[:-1], sizes)
        np.add.at(amounts, place, moved.amounts)
        return _Terms(moved.owner[first], moved.starts[first], moved.ends[first], bounds, amounts)


def reduce(work: Workspace) -> bool:
    """Renumber times and take out constant usage; return whether anything became smaller."""
    return reduce_each(work, _renumber)


def _renumber(work: Workspace, resource: int, limit: int) -> bool:
    tables = [(work.usage[i], work.cost[i].shape) for i in work.living()]
    tables += [(table.usage, table.cost.shape) for table in work.tables.values() if table.usage]
    tables = [(usage, shape) for usage, shape in tables if any(key[0] == resource for key in usage)]
    terms = _Terms.of([usage for usage, _ in tables], resource, work.amount_type)
    changed = False
    while True:
        least = terms.least()
        if least.any():
            work.constant_usage[resource] = work.constant_usage[resource] + _profile(
                terms, least, work.horizons[resource]
            )
            terms = terms.minus(least)
            changed = True
        most = terms.most()
        used = np.asarray(most != 0, dtype=np.bool_)
        if not used.all():
            terms, most = terms.only(used), most[used]
            changed = True
        if work.check_constant_usage():
            return True
        constant = work.constant_usage[resource]
        times = _binding_times(terms, most, constant, limit)
        if len(times) == work.horizons[resource]:
            break
        terms = terms.renumbered(times)
        work.constant_usage[resource] = constant[times]
        work.horizons[resource] = len(times)
        changed = True
    if changed:
        _write(terms, resource, tables)
    return changed


def _profile(terms: _Terms, amount: Integers, horizon: int) -> Integers:
    """Return what one amount per term uses at every time."""
    change = np.zeros(horizon + 1, dtype=amount.dtype)
    np.add.at(change, terms.starts, amount)
    np.subtract.at(change, terms.ends, amount)
    return np.cumsum(change)[:horizon]


def _write(terms: _Terms, resource: int, tables: list[tuple[Usage, tuple[int, ...]]]) -> None:
    """Put the terms of one resource into the place of those that were there."""
    for usage, _ in tables:
        for key in [key for key in usage if key[0] == resource]:
            del usage[key]
    bounds = terms.bounds.tolist()
    for owner, start, end, begin, past in zip(
        terms.owner.tolist(), terms.starts.tolist(), terms.ends.tolist(), bounds, bounds[1:], strict=False
    ):
        usage, shape = tables[owner]
        usage[resource, start, end] = terms.amounts[begin:past].reshape(shape)


def _binding_times(terms: _Terms, most: Integers, constant: Integers, limit: int) -> IntArray:
    starts, ends = terms.starts, terms.ends
    usage = _profile(terms, most, len(constant)) + constant
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


def _bounds(sizes: IntArray) -> IntArray:
    """Return where pieces of these sizes begin, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])
