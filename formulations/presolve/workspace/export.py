"""A workspace as a canonical problem again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from formulations.presolve.workspace.lift import Lift
from formulations.presolve.workspace.state import Integers, Table, Usage, Workspace
from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm

_LARGEST = 2**63 - 1
"""Not tunable: the largest int64."""


def export(work: Workspace, original: StrategyProblem) -> tuple[StrategyProblem, Lift, int]:
    """Return the reduced problem, the way back, and what its objective lacks.

    Usage that no decision changes lowers the limits as far as it is the same at all times; the rest belongs to
    one more node with a single strategy.
    """
    living = list(work.living())
    place = {node: k for k, node in enumerate(living)}
    offset = work.offset
    nodes: list[Node] = []
    factors: list[Factor] = []
    for i in living:
        least = int(work.cost[i].min())
        offset += least
        first, *others = _within_int64(work.cost[i] - least)
        nodes.append(Node(original.nodes[i].name, first, None, tuple(_terms(work.usage[i]))))
        factors += [Factor((place[i],), part) for part in others]
    for scope, table in work.tables.items():
        least = _least_allowed(table)
        offset += least
        cost = table.cost - least
        if table.forbidden is not None:
            cost = np.where(table.forbidden, 0, cost)
        first, *others = _within_int64(cost)
        placed = tuple(place[i] for i in scope)
        factors.append(Factor(placed, first, table.forbidden, tuple(_terms(table.usage))))
        factors += [Factor(placed, part) for part in others]
    resources, constant = _resources(work, original)
    strategies = [work.strategies[i] for i in living]
    if constant:
        nodes.append(Node("(constant usage)", np.zeros(1, dtype=np.int64), None, tuple(constant)))
        living.append(-1)
        strategies.append(np.zeros(1, dtype=np.int64))
    reduced = StrategyProblem(
        original.name,
        tuple(nodes),
        tuple(factors),
        resources,
        max(work.horizons, default=0),
        original.seconds_per_cost,
    )
    lift = Lift(tuple(living), tuple(strategies), tuple(work.follows), len(original.nodes))
    return reduced, lift, offset


def _resources(work: Workspace, original: StrategyProblem) -> tuple[tuple[Resource, ...], list[UsageTerm]]:
    resources: list[Resource] = []
    terms: list[UsageTerm] = []
    for r, (resource, profile) in enumerate(zip(original.resources, work.constant_usage, strict=True)):
        if resource.limit is None or not len(profile):
            resources.append(Resource(resource.name, None))
            continue
        always = int(profile.min())
        resources.append(Resource(resource.name, resource.limit - always))
        terms += _runs(r, profile - always)
    return tuple(resources), terms


def _runs(resource: int, profile: Integers) -> Iterator[UsageTerm]:
    """Yield one term per stretch of constant positive usage."""
    bounds = [0, *(np.flatnonzero(profile[1:] != profile[:-1]) + 1).tolist(), len(profile)]
    for start, end in itertools.pairwise(bounds):
        if profile[start]:
            for part in _within_int64(profile[start : start + 1]):
                yield UsageTerm(resource, start, end, part)


def _least_allowed(table: Table) -> int:
    allowed: Integers = table.cost if table.forbidden is None else table.cost[~table.forbidden]
    return int(allowed.min()) if allowed.size else 0


def _terms(usage: Usage) -> Iterator[UsageTerm]:
    for (resource, start, end), amount in usage.items():
        for part in _within_int64(amount):
            yield UsageTerm(resource, start, end, part)


def _within_int64(values: Integers) -> list[IntArray]:
    """Split non-negative integers into summands that fit into int64."""
    if values.dtype == np.int64:
        return [np.ascontiguousarray(values)]
    parts: list[IntArray] = []
    rest = values
    while int(rest.max()) > _LARGEST:
        part = np.minimum(rest, _LARGEST)
        parts.append(part.astype(np.int64))
        rest = rest - part
    return [*parts, np.ascontiguousarray(rest).astype(np.int64, copy=False)]
