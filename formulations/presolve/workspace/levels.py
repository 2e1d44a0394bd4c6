"""Usage of tables over time, as the reductions of memory need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """Return the levels of all nodes and tables that use a resource."""
    usages: list[tuple[Scope, Usage]] = [((i,), work.usage[i]) for i in work.living()]
    usages += [(scope, table.usage) for scope, table in work.tables.items()]
    found = ((scope, Levels.of(usage, resource)) for scope, usage in usages)
    return {scope: levels for scope, levels in found if levels is not None}


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Usage of one table over time, constant between ``points``.

    Parameters
    ----------
    points
        Times at which something begins or ends, ascending; one more than levels.
    excess
        Usage beyond the least of the table in each segment, shape ``(segments, *table)``.
    least
        The least usage in each segment.
    """

    points: IntArray
    excess: Integers
    least: Integers

    @classmethod
    def of(cls, usage: Usage, resource: int) -> Levels | None:
        """Return the levels of one resource, or None where the table uses nothing of it."""
        terms = [(start, end, amount) for (own, start, end), amount in usage.items() if own == resource]
        if not terms:
            return None
        points = np.unique(np.array([(start, end) for start, end, _ in terms], dtype=np.int64))
        begins = np.searchsorted(points, [start for start, _, _ in terms]).tolist()
        ends = np.searchsorted(points, [end for _, end, _ in terms]).tolist()
        level = np.zeros((len(points), *terms[0][2].shape), dtype=terms[0][2].dtype)
        for begin, end, (_, _, amount) in zip(begins, ends, terms, strict=True):
            level[begin] += amount
            level[end] -= amount
        level = np.cumsum(level, axis=0)[:-1]
        least = level.min(axis=tuple(range(1, level.ndim)))
        return cls(points, level - least.reshape(-1, *(1,) * (level.ndim - 1)), least)

    def add_to(self, profile: Integers, amounts: Integers) -> None:
        """Add an amount per segment to a profile over time, in place."""
        profile[self.points[0] : self.points[-1]] += np.repeat(amounts, np.diff(self.points))

    def spread(self, amounts: Integers) -> Integers:
        """Return an amount per segment in the shape of the levels, for arithmetic with them."""
        return amounts.reshape(-1, *(1,) * (self.excess.ndim - 1))

    def largest(self) -> Integers:
        """Return the largest usage in each segment."""
        most: Integers = self.excess.max(axis=tuple(range(1, self.excess.ndim)))
        return self.least + most

    def beyond(self, slack: Integers) -> BoolArray | None:
        """Return flags of the entries that use more beyond the least than the slack, or None."""
        room = np.minimum.reduceat(slack[: self.points[-1]], self.points[:-1])
        exceeds = np.asarray(self.excess > self.spread(room), dtype=np.bool_)
        over: BoolArray = np.logical_or.reduce(exceeds, axis=0)
        return over if over.any() else None
