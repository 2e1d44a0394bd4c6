r"""Multiple-choice knapsack, exactly: one choice of every class, least cost, weight within a capacity.

OSDP at one batch size is this problem: classes are operators, choices are modes, weights are bytes. Equal operators are
one class with a count. Fronts (:mod:`formulations.osdp.pareto`) of the classes are added one after another;
a sum is dropped where even the linear relaxation of the classes that are left makes it cost more than a ceiling
(Kellerer, Pferschy, Pisinger: Knapsack Problems, 2004, sections 11.2 and 11.5). The ceiling starts near the bound of
the whole relaxation and rises until a solution lies below it, which is then the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from formulations.osdp.pareto import Front, repeated, single, together
from formulations.problem.strategy_problem import BoolArray, IntArray

MOST_POINTS = 300_000
"""Longest list that is kept; where one would be longer, the result may not be optimal and its bound is lower."""

_LEAST_WINDOW = 1000
_FIRST_SHARE = 50
_WINDOW_GROWTH = 7
_ROUNDING = 2  # a relaxation in floats is wrong by less than this, as long as costs stay below 2^50
_FILLING_ROUNDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class KnapsackClass:
    """Equal classes.

    Parameters
    ----------
    weight, cost
        Of every choice, shape ``(S,)``; weights are not negative.
    allowed
        Flags of the possible choices, shape ``(S,)``.
    count
        Number of such classes.
    """

    weight: IntArray
    cost: IntArray
    allowed: BoolArray
    count: int


@dataclass(frozen=True, slots=True)
class Packing:
    """A solution.

    Parameters
    ----------
    cost
        Its cost.
    bound
        Lower bound on the cost of every solution; the cost itself where the search was complete.
    choices
        For each class, in the order of the problem, the choice of each of its copies.
    """

    cost: int
    bound: int
    choices: tuple[tuple[int, ...], ...]


class Relaxation:
    """Least cost of some classes over their capacity, when choices may be mixed: convex and piecewise linear."""

    def __init__(self, classes: Sequence[KnapsackClass]) -> None:
        lightest = cost = 0
        segments: list[tuple[int, int]] = []
        for each in classes:
            corners = _hull(single(each.weight, each.cost, each.allowed))
            lightest += each.count * corners[0][0]
            cost += each.count * corners[0][1]
            segments += [(each.count * (w - v), each.count * (d - c)) for (v, c), (w, d) in pairwise(corners)]
        segments.sort(key=lambda segment: segment[1] / segment[0])
        steps = np.array([(lightest, cost), *segments], dtype=np.int64)
        self.weight, self.cost = np.cumsum(steps, axis=0).T
        self._slope = np.append(steps[1:, 1] / steps[1:, 0], 0.0)

    def bound(self, room: IntArray) -> IntArray:
        """Bound the cost of choices within some capacities, none of which is below the lightest weight."""
        k = np.searchsorted(self.weight, room, side="right") - 1
        saved = np.floor(self._slope[k] * (room - self.weight[k])).astype(np.int64)
        bound: IntArray = self.cost[k] + saved - _ROUNDING
        return bound

    def slope(self, room: int) -> float:
        """Cost of one unit of weight at a capacity, not positive."""
        return float(self._slope[np.searchsorted(self.weight, room, side="right") - 1])


def _hull(front: Front) -> list[tuple[int, int]]:
    """Corners of the lower convex hull of a front, as weights and costs."""
    corners: list[tuple[int, int]] = []
    for w, c in zip(front.weight.tolist(), front.cost.tolist(), strict=True):
        while len(corners) > 1 and _is_above(corners[-2], corners[-1], (w, c)):
            corners.pop()
        corners.append((w, c))
    return corners


def _is_above(first: tuple[int, int], middle: tuple[int, int], last: tuple[int, int]) -> bool:
    """Whether the middle point lies on or above the line between the others."""
    rise = (middle[1] - first[1]) * (last[0] - first[0])
    return rise >= (last[1] - first[1]) * (middle[0] - first[0])


class Knapsack:
    """Classes to choose from, prepared once for any number of capacities.

    Parameters
    ----------
    classes
        At least one, each with a choice that is allowed.
    """

    def __init__(self, classes: Sequence[KnapsackClass]) -> None:
        self.classes = tuple(classes)
        self.relaxation = Relaxation(self.classes)
        self.lightest = int(self.relaxation.weight[0])

    def bound(self, capacity: int) -> int | None:
        """Lower bound on the cost of every solution; None where nothing is light enough."""
        if capacity < self.lightest:
            return None
        return int(self.relaxation.bound(np.array([capacity]))[0])

    @cached_property
    def _fronts(self) -> list[Front]:
        return [repeated(single(each.weight, each.cost, each.allowed), each.count) for each in self.classes]

    @cached_property
    def _order(self) -> list[int]:
        """Classes from long fronts to short ones, but the longest last, where it is only searched."""
        longest_first = sorted(range(len(self.classes)), key=lambda i: -len(self._fronts[i]))
        return [*longest_first[1:], longest_first[0]]

    @cached_property
    def _rest(self) -> list[Relaxation]:
        """For each place in the order but the last, the relaxation of the classes behind it."""
        return [Relaxation([self.classes[i] for i in self._order[k:]]) for k in range(1, len(self._order))]

    def solve(self, capacity: int) -> Packing | None:
        """Find the cheapest solution whose weight is within a capacity; None where there is none."""
        bound = self.bound(capacity)
        if bound is None:
            return None
        filled = self._filled(capacity)
        points, complete = self._search(capacity, bound, self._cost_of(filled), _FIRST_SHARE)
        return self._packing(filled if points is None else points, bound, complete)

    def improve(self, capacity: int, cost: int) -> Packing | None:
        """Find the cheapest solution below a cost; None where it is proved that there is none.

        Where a list grew too long and nothing was found, any solution is returned, with its bound.
        """
        bound = self.bound(capacity)
        if bound is None or bound >= cost:
            return None
        points, complete = self._search(capacity, bound, cost, _WINDOW_GROWTH)
        if points is None and complete:
            return None
        return self._packing(self._filled(capacity) if points is None else points, bound, complete)

    def _search(self, capacity: int, bound: int, cost: int, first_share: int) -> tuple[list[int] | None, bool]:
        """Raise the ceiling from the bound to right below a cost until something lies below it."""
        window = max(_LEAST_WINDOW, (cost - bound) // first_share)
        while bound + window < cost:
            points, complete = self._below(capacity, bound + window)
            if points is not None:
                return points, complete
            window *= _WINDOW_GROWTH
        return self._below(capacity, cost - 1)

    def _below(self, capacity: int, ceiling: int) -> tuple[list[int] | None, bool]:
        """Find the cheapest solution up to a ceiling, as points of the fronts; and whether nothing was left out."""
        nothing = np.zeros(1, dtype=np.int64)
        sums, complete = Front(nothing, nothing, (nothing,)), True
        for i, rest in zip(self._order[:-1], self._rest, strict=True):
            sums = together(sums, self._fronts[i], _Promising(rest, capacity, ceiling))
            if not len(sums):
                return None, complete
            if len(sums) > MOST_POINTS:
                sums, complete = _shortened(sums, rest, capacity), False
        last = self._fronts[self._order[-1]]
        place = np.searchsorted(last.weight, capacity - sums.weight, side="right") - 1
        total = np.where(place >= 0, sums.cost + last.cost[place], np.iinfo(np.int64).max)
        best = int(total.argmin())
        if total[best] > ceiling:
            return None, complete
        points = [0] * len(self._order)
        points[self._order[-1]] = int(place[best])
        for i in reversed(self._order[:-1]):
            points[i] = int(sums.index[1][best])
            best, sums = int(sums.index[0][best]), sums.parts[0]
        return points, complete

    def _filled(self, capacity: int) -> list[int]:
        """Start at the relaxation's price of weight, then let each class in turn use the remaining capacity."""
        price = -self.relaxation.slope(capacity)
        points = [int((front.cost + price * front.weight).argmin()) for front in self._fronts]
        if self._weight_of(points) > capacity:
            points = [0] * len(self._fronts)
        for _ in range(_FILLING_ROUNDS):
            for i, front in enumerate(self._fronts):
                room = capacity - self._weight_of(points) + int(front.weight[points[i]])
                points[i] = int(np.searchsorted(front.weight, room, side="right")) - 1
        return points

    def _weight_of(self, points: Sequence[int]) -> int:
        return sum(int(front.weight[point]) for front, point in zip(self._fronts, points, strict=True))

    def _cost_of(self, points: Sequence[int]) -> int:
        return sum(int(front.cost[point]) for front, point in zip(self._fronts, points, strict=True))

    def _packing(self, points: Sequence[int], bound: int, complete: bool) -> Packing:
        choices = tuple(tuple(front.choices(point)) for front, point in zip(self._fronts, points, strict=True))
        cost = self._cost_of(points)
        return Packing(cost, cost if complete else min(bound, cost), choices)


@dataclass(frozen=True, slots=True)
class _Promising:
    """Keeps sums that can be completed within a capacity and up to a ceiling."""

    rest: Relaxation
    capacity: int
    ceiling: int

    def __call__(self, weight: IntArray, cost: IntArray) -> BoolArray:
        room = self.capacity - weight
        kept: BoolArray = room >= self.rest.weight[0]
        kept[kept] = cost[kept] + self.rest.bound(room[kept]) <= self.ceiling
        return kept


def _shortened(sums: Front, rest: Relaxation, capacity: int) -> Front:
    """The :data:`MOST_POINTS` sums whose completion has the least bound."""
    completed = sums.cost + rest.bound(capacity - sums.weight)
    kept = np.sort(np.argpartition(completed, MOST_POINTS)[:MOST_POINTS])
    return Front(sums.weight[kept], sums.cost[kept], tuple(index[kept] for index in sums.index), sums.parts)
