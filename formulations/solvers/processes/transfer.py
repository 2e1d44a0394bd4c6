"""A problem in memory that several processes map.

A problem of the contest's size holds hundreds of thousands of small arrays, which pickle takes seconds over, and one
with offload hundreds of megabytes, which take seconds on their way through a pipe. Here the arrays lie in a file
without a name, written once for all solvers, and are views of it on the other side. Arrays that several tables share
are written once.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
from dataclasses import dataclass, field
from typing import BinaryIO, Generic, TypeVar

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
    """All of a problem but the entries of its arrays: a table is (cost, forbidden or -1, terms)."""

    name: str
    resources: tuple[Resource, ...]
    horizon: int
    seconds_per_cost: float | None
    time_names: tuple[str, ...]
    node_names: list[str]
    nodes: list[_Table]
    scopes: list[tuple[int, ...]]
    factors: list[_Table]
    integer_shapes: list[tuple[int, ...]]
    flag_shapes: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SharedProblem:
    """A problem whose arrays other processes can map.

    Parameters
    ----------
    packed
        All but the entries of its arrays.
    memory
        The file with the entries, integers before flags; it exists as long as a process has it open or mapped.
    """

    packed: PackedProblem
    memory: BinaryIO


@gc_paused()
def share(problem: StrategyProblem) -> SharedProblem:
    """Write a problem's arrays to a new file in memory; the problem must stay alive until this returns."""
    integers, flags = _Shelf[np.int64](), _Shelf[np.bool_]()

    def table(cost: IntArray, forbidden: BoolArray | None, usage: tuple[UsageTerm, ...]) -> _Table:
        terms = tuple((t.resource, t.start, t.end, integers.add(t.amount)) for t in usage)
        return integers.add(cost), -1 if forbidden is None else flags.add(forbidden), terms

    nodes = [table(node.cost, node.forbidden, node.usage) for node in problem.nodes]
    factors = [table(factor.cost, factor.forbidden, factor.usage) for factor in problem.factors]
    packed = PackedProblem(
        problem.name,
        problem.resources,
        problem.horizon,
        problem.seconds_per_cost,
        problem.time_names,
        [node.name for node in problem.nodes],
        nodes,
        [factor.scope for factor in problem.factors],
        factors,
        [array.shape for array in integers.arrays],
        [array.shape for array in flags.arrays],
    )
    memory = _file_in_memory()
    os.truncate(memory.fileno(), _bytes_of(packed))
    of_integers, of_flags = _views(packed, memory.fileno(), mmap.ACCESS_WRITE)
    integers.write(of_integers)
    flags.write(of_flags)
    return SharedProblem(packed, memory)


@gc_paused()
def unpack(packed: PackedProblem, memory: int) -> StrategyProblem:
    """Rebuild a problem from a file with its arrays, which may be closed afterwards.

    The arrays are views of it; what is written to them stays in this process.
    """
    integers, flags = _views(packed, memory, mmap.ACCESS_COPY)

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

    def write(self, views: list[NDArray[Scalar]]) -> None:
        for view, array in zip(views, self.arrays, strict=True):
            view[...] = array


def _file_in_memory() -> BinaryIO:
    """Open a new file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("meshwright-problem"), "r+b")
    return tempfile.TemporaryFile()


def _bytes_of(packed: PackedProblem) -> int:
    """Return how many bytes all arrays take, at least one: nothing cannot be mapped."""
    integers, flags = (sum(map(math.prod, shapes)) for shapes in (packed.integer_shapes, packed.flag_shapes))
    return max(1, np.dtype(np.int64).itemsize * integers + flags)


def _views(packed: PackedProblem, memory: int, access: int) -> tuple[list[IntArray], list[BoolArray]]:
    """Map the arrays of a file."""
    mapped = mmap.mmap(memory, _bytes_of(packed), access=access)
    count = sum(map(math.prod, packed.integer_shapes))
    integers = np.frombuffer(mapped, np.int64, count)
    flags = np.frombuffer(mapped, np.bool_, sum(map(math.prod, packed.flag_shapes)), offset=integers.nbytes)
    return _split(integers, packed.integer_shapes), _split(flags, packed.flag_shapes)


def _split(buffer: NDArray[Scalar], shapes: list[tuple[int, ...]]) -> list[NDArray[Scalar]]:
    ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    return [buffer[start:end].reshape(shape) for start, end, shape in zip(ends, ends[1:], shapes, strict=False)]
