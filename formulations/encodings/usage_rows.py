"""Usage over time of one resource, by column group: rows of the linear model and an exact replay.

A *group* is a set of columns of which exactly one is chosen (the strategies of a node, the entries
of a factor). A term has the usage of each column of one group during ``[start, end)``. Usage only rises where a
term starts, and a row is implied by another one unless a term starts at its time and a term ends at the next one,
so only these *maximal* times need rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from formulations.problem.strategy_problem import BoolArray, IntArray

EXACT_BITS = 52
"""Usage in rows is shifted right (rounding down) until the limit has this many bits: exact in a double."""

_SAFE_SUM = 1 << 62

Scalar = TypeVar("Scalar", bound=np.generic)


LARGEST_COEFFICIENT = float(1 << 16)
"""Slack of a scaled row at most; smaller slacks are not scaled, so that their amounts stay integers."""

LEAST_COEFFICIENT = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class UsageRow:
    """``base + sum(values * z[columns])`` is the usage at one time, in units of ``2**shift``.

    ``base`` is the sum of the least usage of every group, and values are the usage of columns beyond that. ``limit``
    is in the same units, None where there is none.
    """

    resource: int
    time: int
    columns: IntArray
    values: IntArray
    base: int
    limit: int | None
    shift: int

    @property
    def slack(self) -> int:
        """Limit minus base; negative means infeasible."""
        if self.limit is None:
            raise ValueError("a resource without a limit has no slack")
        return self.limit - self.base

    def scaled(self) -> ScaledRow:
        """Divide by a part of the slack, so that a solver's tolerance means nearly the same in every row.

        Columns that alone exceed the slack are listed as impossible instead; a negative slack gives
        the empty row ``0 <= -1``. Coefficients must stay far above the tolerance: with the slack as the
        unit, HiGHS's presolve cut off optima whose small amounts mattered. Amounts that are still small are left
        out, which relaxes the row; solutions must therefore be replayed.
        """
        if self.slack < 0:
            return ScaledRow(self.columns[:0], np.zeros(0), -1.0, self.columns[:0], 1.0)
        fits = self.values <= self.slack
        unit = max(self.slack / LARGEST_COEFFICIENT, 1.0)
        counts = fits & (self.values >= unit * LEAST_COEFFICIENT)
        kept, amounts = self.columns[counts], self.values[counts] / unit
        return ScaledRow(kept, amounts, self.slack / unit, self.columns[~fits], unit)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledRow:
    """``sum(coefficients * z[columns]) <= upper``, coefficients from LEAST to LARGEST; ``impossible`` ones are zero.

    All of it is in units of ``unit`` of the unscaled row.
    """

    columns: IntArray
    coefficients: NDArray[np.float64]
    upper: float
    impossible: IntArray
    unit: float


@dataclass(frozen=True, slots=True, eq=False)
class UsageTable:
    """All usage terms of one resource.

    Parameters
    ----------
    resource, limit, horizon
        As in the problem.
    group_start
        Columns of group ``g`` are ``group_start[g] .. group_start[g + 1] - 1``.
    group, start, end
        Group and interval per term, shape ``(terms,)``.
    amount_start, amount
        Term ``k`` of group ``g`` has one amount per column of the group, from ``amount_start[k]`` on.
    """

    resource: int
    limit: int | None
    horizon: int
    group_start: IntArray
    group: IntArray
    start: IntArray
    end: IntArray
    amount_start: IntArray
    amount: IntArray

    @classmethod
    def from_terms(
        cls,
        resource: int,
        limit: int | None,
        horizon: int,
        group_start: IntArray,
        terms: list[tuple[int, int, int, IntArray]],
    ) -> UsageTable:
        """Build from ``(group, start, end, amounts)`` tuples; groups without columns are dropped."""
        terms = [t for t in terms if t[3].size]
        sizes = np.array([t[3].size for t in terms], dtype=np.int64)
        amount = np.concatenate([t[3] for t in terms]) if terms else np.zeros(0, dtype=np.int64)
        columns = [np.array([t[k] for t in terms], dtype=np.int64) for k in range(3)]
        return cls(
            resource, limit, horizon, group_start, columns[0], columns[1], columns[2], np.cumsum(sizes) - sizes, amount
        )

    def profile(self, local_choice: IntArray) -> NDArray[np.object_] | IntArray:
        """Exact usage at every time, shape ``(horizon,)``, when group ``g`` picks ``local_choice[g]``."""
        chosen = self.amount[self.amount_start + local_choice[self.group]]
        exact = len(chosen) * int(chosen.max(initial=0)) >= _SAFE_SUM
        return _accumulate(self.horizon, self.start, self.end, chosen.astype(object) if exact else chosen)

    def expected_profile(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Usage at every time under fractional column values, shape ``(horizon,)``."""
        if not len(self.group):
            return np.zeros(self.horizon)
        weighted = self.amount * values[self._columns()]
        return _accumulate(self.horizon, self.start, self.end, np.add.reduceat(weighted, self.amount_start))

    def least_profile(self) -> NDArray[np.object_] | IntArray:
        """Usage at every time that no choice avoids, counted term by term: a lower bound, shape ``(horizon,)``."""
        if not len(self.group):
            return np.zeros(self.horizon, dtype=np.int64)
        least = np.minimum.reduceat(self.amount, self.amount_start)
        exact = len(least) * int(least.max()) >= _SAFE_SUM
        return _accumulate(self.horizon, self.start, self.end, least.astype(object) if exact else least)

    def maximal_times(self, allowed: BoolArray) -> IntArray:
        """Return the times whose rows imply all others and that could exceed the limit, ascending."""
        if not len(self.group):
            return np.zeros(0, dtype=np.int64)
        starts, ends = np.unique(self.start), np.unique(self.end)
        points = np.union1d(starts, ends)
        candidate = points[:-1][np.isin(points[:-1], starts) & np.isin(points[1:], ends)]
        if self.limit is None:
            return candidate
        usable = np.where(allowed[self._columns()], self.amount, 0).astype(np.float64)
        most = _accumulate(self.horizon, self.start, self.end, np.maximum.reduceat(usable, self.amount_start))
        # Sums of doubles are off by far less than this margin; keeping a row too many is harmless.
        return candidate[most[candidate] > self.limit * (1 - 1e-9)]

    def row(self, time: int, allowed: BoolArray) -> UsageRow:
        """Return the row of one time; columns that are not allowed (always zero) are left out."""
        active = np.flatnonzero((self.start <= time) & (time < self.end))
        sizes = np.diff(self.group_start)[self.group[active]]
        offset = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        column = np.repeat(self.group_start[self.group[active]], sizes) + offset
        amount = self.amount[np.repeat(self.amount_start[active], sizes) + offset]
        largest = int(self.amount.max(initial=0)) if self.limit is None else self.limit
        shift = max(0, largest.bit_length() - EXACT_BITS)
        keep = allowed[column]
        column, amount = column[keep], amount[keep] >> shift
        order = np.argsort(column, kind="stable")
        column, first = np.unique(column[order], return_index=True)
        total = np.add.reduceat(amount[order], first) if len(first) else amount
        group = np.searchsorted(self.group_start, column, side="right") - 1
        _, group_first = np.unique(group, return_index=True)
        least = np.minimum.reduceat(total, group_first) if len(group_first) else total
        excess = total - np.repeat(least, np.diff(np.append(group_first, len(column))))
        positive = excess > 0
        limit = None if self.limit is None else self.limit >> shift
        return UsageRow(self.resource, time, column[positive], excess[positive], sum(least.tolist()), limit, shift)

    def cover(self, time: int, local_choice: IntArray) -> IntArray:
        """Chosen columns that together exceed the limit at one time, largest amounts first.

        Not all of them can be chosen: a cut that is exact whatever the size of the amounts.
        """
        by_group: dict[int, int] = {}
        for term in np.flatnonzero((self.start <= time) & (time < self.end)).tolist():
            group = int(self.group[term])
            amount = int(self.amount[self.amount_start[term] + local_choice[group]])
            by_group[group] = by_group.get(group, 0) + amount
        columns: list[int] = []
        total = 0
        for group, amount in sorted(by_group.items(), key=lambda item: -item[1]):
            columns.append(int(self.group_start[group] + local_choice[group]))
            total += amount
            if self.limit is not None and total > self.limit:
                break
        return np.array(columns, dtype=np.int64)

    def _columns(self) -> IntArray:
        """Column of every entry of ``amount``."""
        sizes = np.diff(self.group_start)[self.group]
        return np.arange(len(self.amount)) - np.repeat(self.amount_start - self.group_start[self.group], sizes)


def spread_worst(times: IntArray, severity: NDArray[np.float64], count: int, distance: int = 3) -> list[int]:
    """Pick up to ``count`` of the most severe times that are more than ``distance`` positions apart.

    Neighbouring rows are nearly equal, so a dozen spread rows per round tighten a relaxation fastest.
    """
    picked: list[int] = []
    for position in np.argsort(-severity, kind="stable"):
        if len(picked) == count:
            break
        if all(abs(int(position) - other) > distance for other in picked):
            picked.append(int(position))
    return [int(times[p]) for p in picked]


def _accumulate(horizon: int, start: IntArray, end: IntArray, amount: NDArray[Scalar]) -> NDArray[Scalar]:
    change = np.zeros(horizon + 1, dtype=amount.dtype)
    np.add.at(change, start, amount)
    np.subtract.at(change, end, amount)
    return np.cumsum(change)[:horizon]
