"""Generalised arc consistency: parallel factors grouped by scope, and removal of unsupported strategies."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from formulations.problem.strategy_problem import BoolArray, StrategyProblem

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class FactorGroup:
    """Factors over the same nodes.

    Parameters
    ----------
    scope
        The nodes, ascending; two or three of them.
    members
        Indices of the problem's factors.
    axes
        Per member the axes of its tables in the order of ``scope``.
    """

    scope: tuple[int, ...]
    members: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]

    def oriented(self, member: int, table: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """Return a table of the ``member``-th factor with its axes in the order of the group's scope."""
        if self.axes[member] == (0, 1):
            return table
        return table.transpose(self.axes[member])


def group_factors(problem: StrategyProblem) -> list[FactorGroup]:
    """Group the factors of two or three nodes by their set of nodes, in order of first appearance."""
    members: dict[tuple[int, ...], list[int]] = {}
    for j, factor in enumerate(problem.factors):
        if len(factor.scope) > 1:
            ascending = len(factor.scope) == 2 and factor.scope[0] < factor.scope[1]
            members.setdefault(factor.scope if ascending else tuple(sorted(factor.scope)), []).append(j)
    return [
        FactorGroup(scope, tuple(factors), tuple(_axes(problem.factors[j].scope, scope) for j in factors))
        for scope, factors in members.items()
    ]


def _axes(scope: tuple[int, ...], ascending: tuple[int, ...]) -> tuple[int, ...]:
    if scope == ascending:
        return tuple(range(len(scope)))
    return tuple(scope.index(i) for i in ascending)


def supported_strategies(problem: StrategyProblem, groups: list[FactorGroup]) -> tuple[list[BoolArray], int | None]:
    """Drop strategies that are in no allowed combination of some factor, until every strategy has support.

    Returns
    -------
    tuple
        Flags of the remaining strategies per node, and a node that has none left (then the problem
        is infeasible) or None. Generalised arc consistency, AC-3 (Mackworth 1977).
    """
    alive = [np.ones(node.size, dtype=np.bool_) for node in problem.nodes]
    for i, node in enumerate(problem.nodes):
        if node.forbidden is not None:
            alive[i] &= ~node.forbidden
    for factor in problem.factors:
        if len(factor.scope) == 1 and factor.forbidden is not None:
            alive[factor.scope[0]] &= ~factor.forbidden
    for i, mask in enumerate(alive):
        if not mask.any():
            return alive, i
    masks = {group.scope: flags for group in groups if (flags := _allowed(problem, group)) is not None}
    return alive, propagate(alive, masks)


def propagate(
    alive: MutableSequence[BoolArray], masks: Mapping[tuple[int, ...], BoolArray], deadline: float = math.inf
) -> int | None:
    """Drop strategies without support from ``alive``, in place, until none is left to drop.

    Parameters
    ----------
    alive
        Flags of the remaining strategies per node.
    masks
        Allowed combinations by the nodes of their axes.
    deadline
        Of :func:`time.monotonic`; propagation stops then, and further unsupported strategies may remain.

    Returns
    -------
    int or None
        A node without a strategy left, at which propagation stops; None where there is none.
    """
    constraining: dict[int, list[tuple[int, ...]]] = {}
    for scope in masks:
        for i in scope:
            constraining.setdefault(i, []).append(scope)
    queue = deque(masks)
    queued = set(masks)
    while queue and time.monotonic() <= deadline:
        scope = queue.popleft()
        queued.discard(scope)
        possible = masks[scope]
        for axis, i in enumerate(scope):
            possible = possible & alive[i].reshape([-1 if k == axis else 1 for k in range(len(scope))])
        for axis, i in enumerate(scope):
            kept = possible.any(axis=tuple(k for k in range(len(scope)) if k != axis))
            if (alive[i] & ~kept).any():
                alive[i] = alive[i] & kept
                if not alive[i].any():
                    return i
                fresh = [other for other in constraining[i] if other not in queued and other != scope]
                queue.extend(fresh)
                queued.update(fresh)
    return None


def _allowed(problem: StrategyProblem, group: FactorGroup) -> BoolArray | None:
    """Combinations that no member forbids, or None where nothing is forbidden."""
    result: BoolArray | None = None
    for m, j in enumerate(group.members):
        forbidden = problem.factors[j].forbidden
        if forbidden is not None and forbidden.any():
            flags = ~group.oriented(m, forbidden)
            result = flags if result is None else result & flags
    return result
