"""A problem whose nodes decide in groups: those of a group all take the same strategy.

Tying is a restriction: what the tied problem says about cost and usage is exactly what the lifted assignment costs and
uses. So its assignments are assignments of the whole problem, while its bound is not a bound on that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from formulations.problem.strategy_problem import BoolArray, Factor, IntArray, Node, StrategyProblem, UsageTerm

_SAFE_TOTAL = 2**62
"""Not tunable: sums below it fit int64."""

_Scalar = TypeVar("_Scalar", bound=np.generic)


class TyingError(ValueError):
    """Groups that cannot be tied; the message has the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class TiedProblem:
    """What :func:`tie_nodes` returns.

    Parameters
    ----------
    problem
        One node per group, in the order of the groups' numbers.
    group
        Of every node of the original, shape ``(nodes,)``.
    """

    problem: StrategyProblem
    group: IntArray

    def lift(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the assignment of the original in which every node does what its group does."""
        return tuple(np.array(choices, dtype=np.int64)[self.group].tolist())


def tie_nodes(problem: StrategyProblem, group: IntArray) -> TiedProblem:
    """Tie nodes of equal numbers of strategies.

    Parameters
    ----------
    problem
        A validated problem.
    group
        Number of the group of every node, from 0 on without gaps, shape ``(nodes,)``.

    Raises
    ------
    TyingError
        Nodes of a group have different numbers of strategies, or costs are so large that their sums leave 64 bits.
    """
    _refuse_large_costs(problem)
    members: list[list[Node]] = [[] for _ in range(int(group.max(initial=-1)) + 1)]
    for node, g in zip(problem.nodes, group.tolist(), strict=True):
        members[g].append(node)
    nodes = tuple(_tied_node(own) for own in members)
    numbers = group.tolist()
    factors = _tied_factors([_collapsed(factor, tuple(numbers[i] for i in factor.scope)) for factor in problem.factors])
    return TiedProblem(replace(problem, nodes=nodes, factors=factors), group)


def _refuse_large_costs(problem: StrategyProblem) -> None:
    costs: list[IntArray] = [node.cost for node in problem.nodes] + [factor.cost for factor in problem.factors]
    most = {id(cost): int(np.abs(cost).max()) for cost in costs}
    total = sum(most[id(cost)] for cost in costs)
    if total > _SAFE_TOTAL:
        raise TyingError(f"costs add up to {total}, more than {_SAFE_TOTAL}: use a coarser time quantum")


def _tied_node(members: list[Node]) -> Node:
    first = members[0]
    if len({node.size for node in members}) > 1:
        sizes = ", ".join(f"{node.name} {node.size}" for node in members)
        raise TyingError(f"nodes of one group have different numbers of strategies: {sizes}")
    if len(members) == 1:
        return first
    cost: IntArray = np.sum([node.cost for node in members], axis=0, dtype=np.int64)
    return Node(first.name, cost, _united([node.forbidden for node in members]), _added(members))


def _tied_factors(factors: list[Factor]) -> tuple[Factor, ...]:
    """Factors over the same nodes with the same tables become one of many times the cost."""
    alike: dict[tuple[object, ...], list[Factor]] = defaultdict(list)
    for factor in factors:
        alike[(factor.scope, id(factor.cost), id(factor.forbidden))].append(factor)
    multiples: dict[tuple[int, int], IntArray] = {}
    result = []
    for members in alike.values():
        first = members[0]
        key = id(first.cost), len(members)
        if key not in multiples:
            multiples[key] = first.cost if len(members) == 1 else first.cost * len(members)
        result.append(Factor(first.scope, multiples[key], first.forbidden, _added(members)))
    return tuple(result)


def _added(members: Sequence[Node | Factor]) -> tuple[UsageTerm, ...]:
    """All usage of the members: every one at its own times."""
    return tuple(term for member in members for term in member.usage)


def _collapsed(factor: Factor, scope: tuple[int, ...]) -> Factor:
    """The factor over groups; where two of its nodes are in one group, only the entries where they agree remain."""
    if len(set(scope)) == len(scope):
        return replace(factor, scope=scope)
    kept = tuple(dict.fromkeys(scope))

    def agreeing(table: NDArray[_Scalar]) -> NDArray[_Scalar]:
        sizes = [factor.cost.shape[scope.index(g)] for g in kept]
        axes = np.ogrid[tuple(slice(size) for size in sizes)]
        return np.ascontiguousarray(table[tuple(axes[kept.index(g)] for g in scope)])

    usage = tuple(replace(term, amount=agreeing(term.amount)) for term in factor.usage)
    forbidden = None if factor.forbidden is None else agreeing(factor.forbidden)
    return Factor(kept, agreeing(factor.cost), forbidden, usage)


def _united(flags: Sequence[BoolArray | None]) -> BoolArray | None:
    present = [own for own in flags if own is not None]
    return np.logical_or.reduce(present) if present else None
