"""Only times that matter: those that no neighbour implies, and at which some choice can exceed the limit.

A time is implied by a neighbour unless usage may rise at it and may fall at the next event. The times that
remain are renumbered per resource; what a table uses in any case becomes constant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from formulations.presolve.workspace.levels import reduce_each
from formulations.presolve.workspace.shared_arrays import distinct, extremes
from formulations.presolve.workspace.state import Integers, Usage, Workspace
from formulations.problem.strategy_problem import BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Terms:
    """The terms of one resource: term ``q`` of owner ``owner[q]`` uses ``amounts[q]``.

    The smallest and the largest entries of these are ``least[q]`` and ``most[q]``.
    """

    owner: IntArray
    starts: IntArray
    ends: IntArray
    least: Integers
    most: Integers
    amounts: list[Integers]

    @classmethod
    def of(cls, owners: list[Usage], resource: int) -> _Terms:
        found = [(k, key, amount) for k, usage in enumerate(owners) for key, amount in usage.items()]
        found = [entry for entry in found if entry[1][0] == resource]
        owner = np.array([k for k, _, _ in found], dtype=np.int64)
        intervals = np.array([key[1:] for _, key, _ in found], dtype=np.int64).reshape(-1, 2)
        amounts = [amount for _, _, amount in found]
        least, most = extremes(amounts)
        return cls(owner, intervals[:, 0], intervals[:, 1], least, most, amounts)

    def only(self, kept: BoolArray) -> _Terms:
        owner, starts, ends = (array[kept] for array in (self.owner, self.starts, self.ends))
        amounts = [self.amounts[q] for q in np.flatnonzero(kept).tolist()]
        return _Terms(owner, starts, ends, self.least[kept], self.most[kept], amounts)

    def without_least(self) -> _Terms:
        found, place = distinct(self.amounts)
        rest = [amount - least if (least := amount.min()) else amount for amount in found]
        amounts = [rest[k] for k in place.tolist()]
        return replace(self, least=np.zeros_like(self.least), most=self.most - self.least, amounts=amounts)

    def renumbered(self, times: IntArray) -> _Terms:
        """Write intervals in numbers of ``times``; those without a time are dropped, equal ones are added up."""
        starts, ends = np.searchsorted(times, self.starts), np.searchsorted(times, self.ends)
        moved = replace(self, starts=starts, ends=ends).only(starts < ends)
        order = np.lexsort((moved.ends, moved.starts, moved.owner))
        keys = np.stack([moved.owner[order], moved.starts[order], moved.ends[order]])
        fresh = np.ones(len(order), dtype=np.bool_)
        fresh[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        kept = np.zeros(len(order), dtype=np.bool_)
        kept[order[fresh]] = True
        amounts, least, most = list(moved.amounts), moved.least.copy(), moved.most.copy()
        firsts = order[fresh][np.cumsum(fresh) - 1]
        for q, first in zip(order[~fresh].tolist(), firsts[~fresh].tolist(), strict=True):
            amounts[first] = amounts[first] + amounts[q]
        for first in np.unique(firsts[~fresh]).tolist():
            least[first], most[first] = amounts[first].min(), amounts[first].max()
        return replace(moved, least=least, most=most, amounts=amounts).only(kept)


def reduce(work: Workspace) -> bool:
    """Renumber times and take out constant usage; return whether anything became smaller."""
    return reduce_each(work, _renumber)


def _renumber(work: Workspace, resource: int, limit: int) -> bool:
    owners = [work.usage[i] for i in work.living()] + [table.usage for table in work.tables.values()]
    owners = [usage for usage in owners if any(key[0] == resource for key in usage)]
    terms = _Terms.of(owners, resource)
    changed = False
    while True:
        if terms.least.any():
            least = _profile(terms, terms.least, work.horizons[resource])
            work.constant_usage[resource] = work.constant_usage[resource] + least
            terms = terms.without_least()
            changed = True
        used = np.asarray(terms.most != 0, dtype=np.bool_)
        if not used.all():
            terms = terms.only(used)
            changed = True
        if work.check_constant_usage():
            return True
        constant = work.constant_usage[resource]
        times = _binding_times(terms, constant, limit)
        if len(times) == work.horizons[resource]:
            break
        terms = terms.renumbered(times)
        work.constant_usage[resource] = constant[times]
        work.horizons[resource] = len(times)
        changed = True
    if changed:
        _write(terms, resource, owners)
    return changed


def _profile(terms: _Terms, amount: Integers, horizon: int) -> Integers:
    """Return what one amount per term uses at every time."""
    change = np.zeros(horizon + 1, dtype=amount.dtype)
    np.add.at(change, terms.starts, amount)
    np.subtract.at(change, terms.ends, amount)
    return np.cumsum(change)[:horizon]


def _write(terms: _Terms, resource: int, owners: list[Usage]) -> None:
    """Put the terms of one resource into the place of those that were there."""
    for usage in owners:
        for key in [key for key in usage if key[0] == resource]:
            del usage[key]
    intervals = zip(terms.owner.tolist(), terms.starts.tolist(), terms.ends.tolist(), terms.amounts, strict=True)
    for owner, start, end, amount in intervals:
        owners[owner][resource, start, end] = amount


def _binding_times(terms: _Terms, constant: Integers, limit: int) -> IntArray:
    starts, ends = terms.starts, terms.ends
    usage = _profile(terms, terms.most, len(constant)) + constant
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
