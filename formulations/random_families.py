"""Named families of generated problems that look like real ones, each hard in a way of its own.

Every problem is shaped like a training step: strategies trade time for memory, pairs of layouts that differ
cost a resharding, half of the results live until the mirrored backward operator. A family adds what its name
says: the graph, the number of strategies, forbidden entries, or where the limit lies.

Feasibility is planted: of every node, the strategy that holds least takes part in no forbidden entry, and the
limit is at least the peak of these strategies together. Only ``infeasible`` has no solution.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import Literal, Protocol, get_args

import numpy as np

from formulations.checker import usage_profile
from formulations.problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm
from formulations.random_problems import (
    operator_tables,
    resharding_tables,
    training_step_problem,
    with_limits,
)

Size = Literal["small", "middle", "large"]
SIZES: tuple[Size, ...] = get_args(Size)
"""``small`` can be enumerated, ``middle`` has hundreds of nodes, ``large`` thousands to tens of thousands."""

Scope = tuple[int, ...]
Graph = Callable[[np.random.Generator, int], Iterable[Scope]]

_LAYOUTS = 4
_BRANCH_REACH = 4
_CLIQUE = 6
_LEAVES_OF_A_HUB = 150
_LOCAL_REACH = 40
_TRIANGLE = 3


class Build(Protocol):
    """Makes a problem with so many nodes and strategies a node."""

    def __call__(self, rng: np.random.Generator, nodes: int, strategies: int) -> StrategyProblem:
        """Draw a problem; its name is replaced."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of problem.

    Parameters
    ----------
    description
        One line for lists.
    build
        Draws a problem.
    shapes
        Nodes, and strategies of each, by size.
    """

    description: str
    build: Build
    shapes: Mapping[Size, tuple[int, int]]


class FamilyError(ValueError):
    """A family or size that does not exist, or a negative seed."""


def family_problem(family: str, size: Size, seed: int = 0) -> StrategyProblem:
    """Draw one problem of a family.

    Parameters
    ----------
    family
        A key of :data:`FAMILIES`.
    size
        One of :data:`SIZES`.
    seed
        Non-negative; the same seed gives the same problem.

    Returns
    -------
    StrategyProblem
        Called ``FAMILY-SIZE-SEED``. Costs are nanoseconds, usages bytes.

    Raises
    ------
    FamilyError
        With what exists.
    """
    if family not in FAMILIES:
        raise FamilyError(f"unknown family {family!r}; known are {', '.join(FAMILIES)}")
    if size not in SIZES:
        raise FamilyError(f"unknown size {size!r}; known are {', '.join(SIZES)}")
    if seed < 0:
        raise FamilyError(f"seed is {seed}; give 0 or more")
    name = f"{family}-{size}-{seed}"
    # Families and sizes draw from streams of their own, so that adding one changes no other.
    rng = np.random.default_rng([seed, zlib.crc32(f"{family}-{size}".encode())])
    drawn = FAMILIES[family].build(rng, *FAMILIES[family].shapes[size])
    problem = StrategyProblem(name, drawn.nodes, drawn.factors, drawn.resources, drawn.horizon)
    problem.validate()
    return problem


def _training_step(rng: np.random.Generator, nodes: int, strategies: int) -> StrategyProblem:
    """A transformer-like chain with its backward chain, skip edges and resharding buffers."""
    return training_step_problem(int(rng.integers(2**31)), nodes, strategies, memory=0.3)


def _layout_problem(
    rng: np.random.Generator,
    nodes: int,
    strategies: int,
    graph: Graph,
    memory: float = 0.3,
    forbidden_share: float = 0.0,
) -> StrategyProblem:
    """Draw operators on a graph.

    ``memory`` places the limit between the peak of the strategies that hold least (0: every solution meets
    the limit exactly at that moment) and the peak of those that are cheapest (1).
    """
    layouts = rng.integers(0, _LAYOUTS, (nodes, strategies))
    operators = tuple(_operator(rng, i, nodes, strategies) for i in range(nodes))
    least = [int(np.argmin(node.usage[0].amount)) for node in operators]
    factors = tuple(
        _resharding(rng, scope, [layouts[i] for i in scope], [least[i] for i in scope], forbidden_share)
        for scope in graph(rng, nodes)
    )
    problem = StrategyProblem("", operators, factors, (Resource("memory", None),), nodes)
    cheapest = [int(np.argmin(node.cost)) for node in operators]
    low, high = (int(usage_profile(problem, choices)[0].max()) for choices in (least, cheapest))
    return with_limits(problem, [low + int(memory * max(0, high - low))])


def _operator(rng: np.random.Generator, index: int, count: int, strategies: int) -> Node:
    """Draw one operator; a result of the first half lives until its mirrored operator or for a short while."""
    _, cost, held = operator_tables(rng, strategies)
    kept_for_backward = index < count // 2 and rng.random() < 0.5
    last = count - index if kept_for_backward else index + int(rng.integers(1, 6))
    return Node(f"op{index}", cost, None, (UsageTerm(0, index, min(last, count), held),))


def _resharding(
    rng: np.random.Generator, scope: Scope, layouts: list[IntArray], planted: list[int], forbidden_share: float
) -> Factor:
    """Draw what it costs when neighbours, one after another in the scope, have different layouts."""
    shape = tuple(len(layout) for layout in layouts)
    cost = np.zeros(shape, dtype=np.int64)
    for axis in range(len(scope) - 1):
        _, pair = resharding_tables(rng, layouts[axis], layouts[axis + 1])
        cost += np.expand_dims(pair, tuple(k for k in range(len(scope)) if k not in (axis, axis + 1)))
    if not forbidden_share:
        return Factor(scope, cost)
    flags = rng.random(shape) < forbidden_share
    for axis, strategy in enumerate(planted):
        flags[(slice(None),) * axis + (strategy,)] = False
    return Factor(scope, cost, flags)


def _tree(rng: np.random.Generator, nodes: int) -> Iterable[Scope]:
    """Branches that are short, as those of a transformer's blocks are."""
    return [(int(rng.integers(max(0, i - _BRANCH_REACH), i)), i) for i in range(1, nodes)]


def _cliques(rng: np.random.Generator, nodes: int) -> Iterable[Scope]:
    """Complete blocks, one after another; the last node of each is tied to the first of the next."""
    blocks = [range(first, min(first + _CLIQUE, nodes)) for first in range(0, nodes, _CLIQUE)]
    inside = [pair for block in blocks for pair in combinations(block, 2)]
    return inside + [(block[0] - 1, block[0]) for block in blocks[1:]]


def _grid(rng: np.random.Generator, nodes: int) -> Iterable[Scope]:
    """A grid as square as it gets: its treewidth grows with its side."""
    columns = max(1, round(nodes**0.5))
    right = [(i, i + 1) for i in range(nodes - 1) if (i + 1) % columns]
    return right + [(i, i + columns) for i in range(nodes - columns)]


def _hubs(rng: np.random.Generator, nodes: int) -> Iterable[Scope]:
    """A few nodes that all others hang on, two hubs each, beside a tree."""
    hubs = sorted(int(i) for i in rng.choice(nodes, 1 + nodes // _LEAVES_OF_A_HUB, replace=False))
    tied = set(_tree(rng, nodes))
    for i in set(range(nodes)) - set(hubs):
        tied |= {(min(i, hubs[k]), max(i, hubs[k])) for k in rng.integers(0, len(hubs), 2)}
    return sorted(tied)


def _half_isolated(rng: np.random.Generator, nodes: int) -> Iterable[Scope]:
    """A tree over a random half of the nodes; the others share nothing but the memory."""
    half = sorted(int(i) for i in rng.choice(nodes, nodes // 2, replace=False))
    return [(half[a], half[b]) for a, b in _tree(rng, len(half))]


def _sparse(rng: np.random.Generator, nodes: int) -> Iterable[Scope]:
    """A chain with about one chord a node: low degrees, but neither trees nor ties that could be merged."""
    chords = {(i, min(nodes - 1, i + 2 + int(rng.integers(_LOCAL_REACH)))) for i in range(nodes - 2)}
    return sorted({(i, i + 1) for i in range(nodes - 1)} | chords)


def _triples(rng: np.random.Generator, nodes: int) -> Iterable[Scope]:
    """Windows of three neighbours."""
    return [(i, i + 1, i + 2) for i in range(nodes - 2)]


def _infeasible(rng: np.random.Generator, nodes: int, strategies: int) -> StrategyProblem:
    """Triangles in which at most one node may be small, and half a node too little memory for that.

    No table and no relaxation shows it: pair by pair, half of the nodes could be small.
    """
    unit = int(rng.integers(2, 2**30))
    held = np.full(strategies, 2 * unit)
    held[0] = unit
    operators = tuple(
        Node(f"op{i}", operator_tables(rng, strategies)[1], None, (UsageTerm(0, 0, 1, held),)) for i in range(nodes)
    )
    both_small = np.zeros((strategies, strategies), dtype=np.bool_)
    both_small[0, 0] = True
    factors = []
    for first in range(0, nodes, _TRIANGLE):
        for scope in combinations(range(first, first + _TRIANGLE), 2):
            _, cost = resharding_tables(rng, *rng.integers(0, _LAYOUTS, (2, strategies)))
            factors.append(Factor(scope, cost, both_small))
    limit = (2 * _TRIANGLE - 1) * unit * (nodes // _TRIANGLE) - unit // 2
    return StrategyProblem("", operators, tuple(factors), (Resource("memory", limit),), 1)


def _shapes(small: tuple[int, int], middle: tuple[int, int], large: tuple[int, int]) -> Mapping[Size, tuple[int, int]]:
    return MappingProxyType({"small": small, "middle": middle, "large": large})


_USUAL = _shapes((6, 4), (300, 6), (5_000, 8))

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "chains": Family("a transformer's training step: chains, skips, buffers", _training_step, _USUAL),
        "trees": Family("short branches", partial(_layout_problem, graph=_tree), _USUAL),
        "cliques": Family("complete blocks in a row", partial(_layout_problem, graph=_cliques), _USUAL),
        "grids": Family("square grids", partial(_layout_problem, graph=_grid), _USUAL),
        "hubs": Family("nodes of degree in the hundreds", partial(_layout_problem, graph=_hubs), _USUAL),
        "strategies": Family(
            "over a hundred strategies a node",
            partial(_layout_problem, graph=_tree),
            _shapes((2, 110), (60, 120), (1_000, 140)),
        ),
        "isolated": Family(
            "half of the nodes share nothing but the memory", partial(_layout_problem, graph=_half_isolated), _USUAL
        ),
        "sparse": Family(
            "many nodes that no presolve can merge",
            partial(_layout_problem, graph=_sparse),
            _shapes((6, 4), (1_000, 5), (30_000, 5)),
        ),
        "triples": Family("factors over three nodes", partial(_layout_problem, graph=_triples), _USUAL),
        "forbidden": Family(
            "a third of the combinations forbidden",
            partial(_layout_problem, graph=_sparse, forbidden_share=1 / 3),
            _USUAL,
        ),
        "tight": Family(
            "hardly more memory than is needed", partial(_layout_problem, graph=_tree, memory=0.03), _USUAL
        ),
        "exact": Family("exactly the memory that is needed", partial(_layout_problem, graph=_tree, memory=0.0), _USUAL),
        "infeasible": Family(
            "too little memory, which no pair of nodes shows", _infeasible, _shapes((6, 3), (60, 4), (600, 6))
        ),
    }
)
"""All families by name."""
