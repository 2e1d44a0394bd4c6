r"""Limits as decisions: the smallest limits that fit are a canonical problem of their own.

.. math:: \min\; \sum_r \sum_j a_{r,j} b_{r,j}
          \quad\text{s.t.}\quad usage_{r,t}(x) \le low_r + \sum_j a_{r,j} b_{r,j} \ \ \forall r, t

Every binary :math:`b_{r,j}` is a node whose first strategy costs nothing and occupies :math:`a_{r,j}` of ``r``
at all times, and whose second costs :math:`a_{r,j}` and occupies nothing, under the fixed limit
:math:`high_r = low_r + \sum_j a_{r,j}`. All other costs are zero. Amounts are powers of two and a remainder, so that
every integer limit from ``low`` to ``high`` is one choice of the binaries.

So whatever is exact for a canonical problem (presolve, bounds, solvers) is exact for the smallest limit, and for all
limits from ``low`` to ``high`` at once: a time, for instance, is dropped only where usage cannot exceed ``low``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from formulations.problem.strategy_problem import Factor, IntArray, Node, StrategyProblem, UsageTerm

_LARGEST_PART = 1 << 62
"""Not tunable: sums below it fit int64."""


@dataclass(frozen=True, slots=True, eq=False)
class PeakProblem:
    """A problem whose cost is the sum of limits, each less its lowest.

    Parameters
    ----------
    problem
        The canonical problem; its first ``decisions`` nodes are those of the original one.
    decisions
        Number of nodes of the original problem.
    low
        The lowest limit of every resource whose limit is a decision.
    parts
        Per further node its resource and its amount.
    """

    problem: StrategyProblem
    decisions: int
    low: Mapping[int, int]
    parts: tuple[tuple[int, int], ...]

    def original_choices(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the original nodes."""
        return tuple(choices[: self.decisions])

    def with_limits(self, choices: Sequence[int], limits: Mapping[int, int]) -> tuple[int, ...]:
        """Return original ``choices`` and the binaries that make these limits (each from its low to its high)."""
        rest = {r: max(0, limits[r] - low) for r, low in self.low.items()}
        binaries = []
        for resource, part in reversed(self.parts):
            taken = part <= rest[resource]
            rest[resource] -= part * taken
            binaries.append(int(taken))
        return (*choices, *reversed(binaries))


def peak_problem(problem: StrategyProblem, ranges: Mapping[int, tuple[int, int]]) -> PeakProblem:
    """Turn limits into decisions; the limits of other resources hold, costs do not count.

    Parameters
    ----------
    problem
        A validated problem.
    ranges
        Per resource the lowest and the highest limit. No lower limit is told apart from the lowest, and assignments
        that need more than the highest do not count.
    """
    zeros: dict[tuple[int, ...], IntArray] = {}

    def no_cost(table: Node | Factor) -> IntArray:
        return zeros.setdefault(table.cost.shape, np.zeros(table.cost.shape, dtype=np.int64))

    nodes = [replace(node, cost=no_cost(node)) for node in problem.nodes]
    factors = tuple(replace(factor, cost=no_cost(factor)) for factor in problem.factors)
    resources = list(problem.resources)
    parts: list[tuple[int, int]] = []
    for r, (low, high) in ranges.items():
        parts += [(r, part) for part in _parts(high - low)]
        resources[r] = replace(resources[r], limit=max(low, high))
    for resource, part in parts:
        withheld = UsageTerm(resource, 0, problem.horizon, np.array([part, 0], dtype=np.int64))
        name = f"({part} of {resources[resource].name})"
        nodes.append(Node(name, np.array([0, part], dtype=np.int64), None, (withheld,)))
    encoded = replace(problem, nodes=tuple(nodes), factors=factors, resources=tuple(resources), seconds_per_cost=None)
    lowest = {r: low for r, (low, _) in ranges.items()}
    return PeakProblem(encoded, len(problem.nodes), lowest, tuple(parts))


def peak_range(problem: StrategyProblem, resource: int) -> tuple[int, int]:
    """Return two peaks: what no choice avoids and what none exceeds, table by table, in exact integers."""
    least, most = _Profile(), _Profile()
    for _, term in problem.usage_terms():
        if term.resource == resource and term.start < term.end:
            least.add(term, int(term.amount.min()))
            most.add(term, int(term.amount.max()))
    return least.peak(), most.peak()


class _Profile:
    """Usage over time in Python integers, held as changes."""

    def __init__(self) -> None:
        self._changes: dict[int, int] = {}

    def add(self, term: UsageTerm, amount: int) -> None:
        self._changes[term.start] = self._changes.get(term.start, 0) + amount
        self._changes[term.end] = self._changes.get(term.end, 0) - amount

    def peak(self) -> int:
        return max(itertools.accumulate(self._changes[t] for t in sorted(self._changes)), default=0)


def _parts(total: int) -> list[int]:
    """Split into powers of two (as long as they fit into int64) and a remainder: their sums reach every integer."""
    parts: list[int] = []
    part, rest = 1, total
    while rest > 0:
        parts.append(min(part, rest))
        rest -= parts[-1]
        part = min(2 * part, _LARGEST_PART)
    return parts
