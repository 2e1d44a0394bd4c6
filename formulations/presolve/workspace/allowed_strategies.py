"""Cut forbidden strategies out of all tables.

The other reductions look at whole tables first. Where most strategies of a large problem have just been forbidden,
cutting them out first makes what follows as small as what is left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.flat import equal_as_one, restricted
from formulations.presolve.workspace.lift import Lift
from formulations.problem.strategy_problem import Factor, IntArray, Node, StrategyProblem, UsageTerm

_Scalar = TypeVar("_Scalar", bound=np.generic)


def cut_forbidden_strategies(problem: StrategyProblem) -> tuple[StrategyProblem, Lift]:
    """Return the problem over the strategies that are not forbidden, and the way back.

    A node whose strategies are all forbidden keeps them, so that the contradiction can be named.
    """
    allowed = equal_as_one(map(_allowed, problem.nodes))
    tables = _Tables()
    nodes = tuple(_cut_node(node, tables.over([kept])) for node, kept in zip(problem.nodes, allowed, strict=True))
    factors = tuple(_cut_factor(factor, tables.over([allowed[i] for i in factor.scope])) for factor in problem.factors)
    lift = Lift(tuple(range(len(nodes))), allowed, (), len(nodes))
    return replace(problem, nodes=nodes, factors=factors), lift


def _allowed(node: Node) -> IntArray:
    everything: IntArray = np.arange(node.size, dtype=np.int64)
    if node.forbidden is None or node.forbidden.all():
        return everything
    return everything[~node.forbidden]


def _cut_node(node: Node, cut: _Cut) -> Node:
    forbidden = None if node.forbidden is None else cut.unless_zero(node.forbidden)
    return Node(node.name, cut.table(node.cost), forbidden, cut.usage(node.usage))


def _cut_factor(factor: Factor, cut: _Cut) -> Factor:
    forbidden = None if factor.forbidden is None else cut.unless_zero(factor.forbidden)
    return Factor(factor.scope, cut.table(factor.cost), forbidden, cut.usage(factor.usage))


class _Tables:
    """Tables that have been cut: what is shared before is cut once and shared after.

    Blocks of a deep model share their tables, so that most of the work would be done dozens of times.
    """

    def __init__(self) -> None:
        self._cuts: dict[tuple[int, ...], _Cut] = {}

    def over(self, kept: list[IntArray]) -> _Cut:
        """Return what cuts tables to the kept strategies of each axis; equal ones have to be one object."""
        key = tuple(map(id, kept))
        if key not in self._cuts:
            self._cuts[key] = _Cut(kept)
        return self._cuts[key]


class _Cut:
    """Cuts tables, which must stay alive meanwhile, to the kept strategies of each axis."""

    def __init__(self, kept: list[IntArray]) -> None:
        self.kept = kept
        self._tables: dict[int, NDArray[Any]] = {}
        self._unless_zero: dict[int, NDArray[Any] | None] = {}

    def table(self, table: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """Return a table over the kept strategies."""
        if id(table) not in self._tables:
            self._tables[id(table)] = restricted(table, self.kept)
        return self._tables[id(table)]

    def unless_zero(self, table: NDArray[_Scalar]) -> NDArray[_Scalar] | None:
        """Return a table over the kept strategies, or None where only zeros (False) are left of it."""
        if id(table) not in self._unless_zero:
            cut = restricted(table, self.kept)
            self._unless_zero[id(table)] = cut if cut.any() else None
        return self._unless_zero[id(table)]

    def usage(self, terms: tuple[UsageTerm, ...]) -> tuple[UsageTerm, ...]:
        """Return what is used over the kept strategies."""
        cut = ((term, self.unless_zero(term.amount)) for term in terms)
        return tuple(
            UsageTerm(term.resource, term.start, term.end, amount) for term, amount in cut if amount is not None
        )
