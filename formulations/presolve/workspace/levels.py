"""Usage of tables over time, as the reductions of memory need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from formulations.presolve.workspace.state import Integers, Scope, Usage, Workspace
from formulations.problem.strategy_problem import BoolArray, IntArray


def reduce_each(work: Workspace, reduce_one: Callable[[Workspace, int, int], bool]) -> bool:
    """Reduce each resource that has a limit, given with the limit, until a contradiction is found or time is over."""
    changed = False
    for resource, limit in enumerate(work.limits):
        if limit is not None and not work.contradiction and not work.out_of_time():
            changed |= reduce_one(work, resource, limit)
    return changed


def levels_of(work: Workspace, resource: int) -> dict[Scope, Levels]:
    """Return the levels of all nodes and tables that use a resource; those whose amounts are as before are reused."""
    usages: list[tuple[Scope, Usage]] = [((i,), work.usage[i]) for i in work.living()]
    usages += [(scope, table.usage) for scope, table in work.tables.items()]
    before = work.levels.get(resource, {})
    found = ((scope, Levels.of(usage, resource, before.pop(scope, None))) for scope, usage in usages)
    work.levels[resource] = {scope: levels for scope, levels in found if levels is not None}
    return work.levels[resource]


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Usage of one table over time, constant between ``points``.

    Parameters
    ----------
    points
        Times at which something begins or ends, ascending; one more than levels.
    least, span
        The least usage in each segment, and the largest beyond it.
    terms
        What was added up: for every amount, the segment in which it begins, and that in which it no longer counts.
    """

    points: IntArray
    least: Integers
    span: Integers
    terms: list[tuple[int, int, Integers]]

    @classmethod
    def of(cls, usage: Usage, resource: int, before: Levels | None = None) -> Levels | None:
        """Return the levels of one resource, or None where the table uses nothing of it; earlier ones may be reused."""
        own = [(start, end, amount) for (used, start, end), amount in usage.items() if used == resource]
        if not own:
            return None
        points = np.unique(np.array([(start, end) for start, end, _ in own], dtype=np.int64))
        begins = np.searchsorted(points, [start for start, _, _ in own]).tolist()
        ends = np.searchsorted(points, [end for _, end, _ in own]).tolist()
        terms = [(begin, end, amount) for begin, end, (_, _, amount) in zip(begins, ends, own, strict=True)]
        if before is not None and before._adds_up(terms):
            return replace(before, points=points)
        levels = _added_up(terms, len(points))
        own_axes = tuple(range(1, levels.ndim))
        least = levels.min(axis=own_axes)
        return cls(points, least, levels.max(axis=own_axes) - least, terms)

    def excess(self) -> Integers:
        """Return the usage beyond the least in each segment, shape ``(segments, *table)``; it is not kept."""
        levels = _added_up(self.terms, len(self.points))
        levels -= self.least.reshape(-1, *(1,) * (levels.ndim - 1))
        return levels

    def _adds_up(self, terms: list[tuple[int, int, Integers]]) -> bool:
        """Whether these are the same terms; where amounts change, their arrays are replaced."""
        pairs = zip(self.terms, terms, strict=True)
        return len(self.terms) == len(terms) and all(a[2] is b[2] and a[:2] == b[:2] for a, b in pairs)

    def add_to(self, profile: Integers, amounts: Integers) -> None:
        """Add an amount per segment to a profile over time, in place."""
        profile[self.points[0] : self.points[-1]] += np.repeat(amounts, np.diff(self.points))

    def highest(self, profile: Integers) -> Integers:
        """Return the largest value of a profile over time in each segment."""
        most: Integers = np.maximum.reduceat(profile[: self.points[-1]], self.points[:-1])
        return most

    def beyond(self, slack: Integers) -> BoolArray | None:
        """Return flags of the entries that use more beyond the least than the slack, or None."""
        room = -self.highest(-slack)
        tight = self.span > room
        if not tight.any():
            return None
        excess = self.excess()[tight]
        exceeds = np.asarray(excess > room[tight].reshape(-1, *(1,) * (excess.ndim - 1)), dtype=np.bool_)
        over: BoolArray = np.logical_or.reduce(exceeds, axis=0)
        return over


def _added_up(terms: list[tuple[int, int, Integers]], points: int) -> Integers:
    """Return the usage in each segment between so many points."""
    amount = terms[0][2]
    levels = np.zeros((points, *amount.shape), dtype=amount.dtype)
    for begin, end, amount in terms:
        levels[begin] += amount
        levels[end] -= amount
    return np.cumsum(levels, axis=0, out=levels)[:-1]
