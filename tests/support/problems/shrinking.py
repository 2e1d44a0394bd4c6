"""Makes a failing problem small enough to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from formulations.problem.strategy_problem import Factor, Node, Resource, StrategyProblem, UsageTerm

Table = TypeVar("Table", Node, Factor)
Item = TypeVar("Item")


def shrunk(problem: StrategyProblem, fails: Callable[[StrategyProblem], bool]) -> StrategyProblem:
    """Remove parts for as long as the problem still fails; nothing that is left can be removed alone.

    Parameters
    ----------
    problem
        A problem for which ``fails`` is true.
    fails
        Whether a problem shows the failure.
    """
    smaller = next(filter(fails, _smaller(problem)), None)
    while smaller is not None:
        problem = smaller
        smaller = next(filter(fails, _smaller(problem)), None)
    return problem


def _smaller(problem: StrategyProblem) -> Iterator[StrategyProblem]:
    """Yield the problem with one thing less, the large things first."""
    nodes, factors = problem.nodes, problem.factors
    for i in range(len(nodes)):
        yield _without_node(problem, i)
    for j in range(len(factors)):
        yield replace(problem, factors=_without(factors, j))
    for i, node in enumerate(nodes):
        for s in range(node.size if node.size > 1 else 0):
            yield _without_strategy(problem, i, s)
    for i, node in enumerate(nodes):
        for plainer in _plainer(node):
            yield replace(problem, nodes=_with(nodes, i, plainer))
    for j, factor in enumerate(factors):
        for plainer in _plainer(factor):
            yield replace(problem, factors=_with(factors, j, plainer))
    for r, resource in enumerate(problem.resources):
        if resource.limit is not None:
            free = Resource(resource.name, None)
            yield replace(problem, resources=_with(problem.resources, r, free))


def _plainer(table: Table) -> Iterator[Table]:
    """A node or factor without a usage term, without flags, without cost, or with smaller numbers."""
    for k in range(len(table.usage)):
        yield replace(table, usage=_without(table.usage, k))
    if table.forbidden is not None:
        yield replace(table, forbidden=None)
    if table.cost.any():
        yield replace(table, cost=np.zeros_like(table.cost))
        if abs(int(table.cost.min())) > 1 or abs(int(table.cost.max())) > 1:
            yield replace(table, cost=np.sign(table.cost) * (np.abs(table.cost) // 2))


def _without_node(problem: StrategyProblem, removed: int) -> StrategyProblem:
    factors = tuple(
        replace(factor, scope=tuple(i - (i > removed) for i in factor.scope))
        for factor in problem.factors
        if removed not in factor.scope
    )
    return replace(problem, nodes=_without(problem.nodes, removed), factors=factors)


def _without_strategy(problem: StrategyProblem, i: int, strategy: int) -> StrategyProblem:
    nodes = _with(problem.nodes, i, _cut(problem.nodes[i], 0, strategy))
    factors = tuple(_cut(f, f.scope.index(i), strategy) if i in f.scope else f for f in problem.factors)
    return replace(problem, nodes=nodes, factors=factors)


def _cut(table: Table, axis: int, entry: int) -> Table:
    flags = None if table.forbidden is None else np.delete(table.forbidden, entry, axis)
    usage = tuple(UsageTerm(t.resource, t.start, t.end, np.delete(t.amount, entry, axis)) for t in table.usage)
    return replace(table, cost=np.delete(table.cost, entry, axis), forbidden=flags, usage=usage)


def _without(items: tuple[Item, ...], k: int) -> tuple[Item, ...]:
    return (*items[:k], *items[k + 1 :])


def _with(items: tuple[Item, ...], k: int, item: Item) -> tuple[Item, ...]:
    return (*items[:k], item, *items[k + 1 :])
