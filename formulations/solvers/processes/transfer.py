"""A problem as few large arrays, to send it to another process quickly.

A problem of the contest's size holds hundreds of thousands of small arrays, which pickle takes seconds
over. Here they travel as two buffers and are views of them on the other side. Arrays that several tables
share are sent once.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from formulations.problem.gc_pause import gc_paused
from formulations.problem.strategy_problem import (
    BoolArray,
    Factor,
    IntArray,
    Node,
    Resource,
    StrategyProblem,
    UsageTerm,
)

Scalar = TypeVar("Scalar", bound=np.generic)
_Term = tuple[int, int, int, int]
_Table = tuple[int, int, tuple[_Term, ...]]


@dataclass(frozen=True, slots=True)
class PackedProblem:
    """What :func:`pack` makes and :func:`unpack` reads: a table is (cost, forbidden or -1, terms)."""

    name: str
    resources: tuple[Resource, ...]
    horizon: int
    seconds_per_cost: float | None
    time_names: tuple[str, ...]
    node_names: list[str]
    nodes: list[_Table]
    scopes: list[tuple[int, ...]]
    factors: list[_Table]
    integers: IntArray
    integer_shapes: list[tuple[int, ...]]
    flags: BoolArray
    flag_shapes: list[tuple[int, ...]]


@gc_paused()
def pack(problem: StrategyProblem) -> PackedProblem:
    """Pack a problem; it must stay alive until this returns."""
    integers, flags = _Shelf[np.int64](), _Shelf[np.bool_]()

    def table(cost: IntArray, forbidden: BoolArray | None, usage: tuple[UsageTerm, ...]) -> _Table:
        terms = tuple((t.resource, t.start, t.end, integers.add(t.amount)) for t in usage)
        return integers.add(cost), -1 if forbidden is None else flags.add(forbidden), terms

    nodes = [table(node.cost, node.forbidden, node.usage) for node in problem.nodes]
    factors = [table(factor.cost, factor.forbidden, factor.usage) for factor in problem.factors]
    return PackedProblem(
        problem.name,
        problem.resources,
        problem.horizon,
        problem.seconds_per_cost,
        problem.time_names,
        [node.name for node in problem.nodes],
        nodes,
        [factor.scope for factor in problem.factors],
        factors,
        np.concatenate([np.zeros(0, dtype=np.int64), *(array.ravel() for array in integers.arrays)]),
        [array.shape for array in integers.arrays],
        np.concatenate([np.zeros(0, dtype=np.bool_), *(array.ravel() for array in flags.arrays)]),
        [array.shape for array in flags.arrays],
    )


@gc_paused()
def unpack(packed: PackedProblem) -> StrategyProblem:
    """Rebuild the problem; its arrays are views of the packed buffers."""
    integers = _views(packed.integers, packed.integer_shapes)
    flags = _views(packed.flags, packed.flag_shapes)

    def usage(terms: tuple[_Term, ...]) -> tuple[UsageTerm, ...]:
        return tuple(UsageTerm(resource, start, end, integers[k]) for resource, start, end, k in terms)

    nodes = tuple(
        Node(name, integers[cost], flags[forbidden] if forbidden >= 0 else None, usage(terms))
        for name, (cost, forbidden, terms) in zip(packed.node_names, packed.nodes, strict=True)
    )
    factors = tuple(
        Factor(scope, integers[cost], flags[forbidden] if forbidden >= 0 else None, usage(terms))
        for scope, (cost, forbidden, terms) in zip(packed.scopes, packed.factors, strict=True)
    )
    return StrategyProblem(
        packed.name, nodes, factors, packed.resources, packed.horizon, packed.seconds_per_cost, packed.time_names
    )


@dataclass(slots=True)
class _Shelf(Generic[Scalar]):
    """Arrays by identity, each kept once."""

    arrays: list[NDArray[Scalar]] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    def add(self, array: NDArray[Scalar]) -> int:
        place = self.places.setdefault(id(array), len(self.arrays))
        if place == len(self.arrays):
            self.arrays.append(array)
        return place


def _views(buffer: NDArray[Scalar], shapes: list[tuple[int, ...]]) -> list[NDArray[Scalar]]:
    ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    return [buffer[start:end].reshape(shape) for start, end, shape in zip(ends, ends[1:], shapes, strict=False)]
