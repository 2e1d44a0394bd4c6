"""Named families of generated problems that resemble real ones, each with a different difficulty.

Every problem is shaped like a training step: strategies trade time for memory, pairs of layouts that differ
cost a resharding, half of the results live until the mirrored backward operator. Families differ in the graph, the
number of strategies, forbidden entries, or the tightness of the limit.

Feasibility is planted: the strategy of least memory of every node is in no forbidden entry, and the limit is at least
the peak of these strategies together. Only ``infeasible`` has no solution.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from types import MappingProxyType
from typing import Literal, Protocol, get_args

import numpy as np

from formulations.instances.random_problems import (
    operator_tables,
    resharding_tables,
    training_step_problem,
    with_limits,
)
from formulations.problem.checker import usage_profile
from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm

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
_MESH = (8, 4, 2)
_LINK_PRICE = (4.0, 1.0, 0.5)
"""Devices along each axis of a mesh, and nanoseconds for a thousand bytes over a link of it."""


class Build(Protocol):
    """Function that makes a problem of a given number of nodes and of strategies per node."""

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
        If there is no such family or size, or the seed is negative; the message lists the known names.
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

    ``memory`` places the limit between the peak of the strategies of least memory (0: every solution meets the limit
    exactly at that moment) and the peak of the cheapest strategies (1).
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
    """Draw resharding costs for consecutive nodes of the scope with different layouts."""
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


def _mesh_problem(
    rng: np.random.Generator, nodes: int, strategies: int, graph: Graph, memory: float = 0.1
) -> StrategyProblem:
    """Draw operators whose strategies are the layouts of a tensor on a mesh of devices.

    A layout maps each axis of the mesh to the dimension that it splits, or to 0 for none. So ``d`` dimensions on ``a``
    axes have ``(d + 1) ** a`` layouts; ``strategies`` is the largest such number. Costs are those of collectives.
    """
    axes = len(_MESH) if strategies >= 27 else 2
    most = max(1, round(strategies ** (1 / axes)) - 1)
    dimensions = np.maximum(1, most - rng.choice(3, nodes, p=(0.6, 0.2, 0.2)))
    layouts = [np.array(list(product(range(d + 1), repeat=axes))) for d in dimensions.tolist()]
    size = rng.lognormal(16, 1, nodes)
    operators = tuple(_mesh_operator(rng, i, nodes, layouts[i], float(size[i])) for i in range(nodes))
    factors = []
    for scope in graph(rng, nodes):
        first, second = (int(dimensions[i]) for i in scope)
        # Dimensions of the second tensor are those of the first, in another order where it is transposed.
        source = np.zeros(second + 1, dtype=np.int64)
        shared = min(first, second)
        order = rng.permutation(first) if rng.random() < 0.3 else np.arange(first)
        source[1 : shared + 1] = 1 + order[:shared]
        price = float(size[scope[0]]) * rng.lognormal(-1, 0.5)
        factors.append(Factor(scope, _collectives(layouts[scope[0]], source[layouts[scope[1]]], price)))
    problem = StrategyProblem("", operators, tuple(factors), (Resource("memory", None),), nodes)
    least = [int(np.argmin(node.usage[0].amount)) for node in operators]
    low = int(usage_profile(problem, least)[0].max())
    high = int(usage_profile(problem, [0] * nodes)[0].max())
    return with_limits(problem, [low + int(memory * (high - low))])


def _mesh_operator(rng: np.random.Generator, index: int, count: int, layouts: IntArray, size: float) -> Node:
    """Draw an operator that pays for some dimensions that some axes split (sums over devices); half pay nothing."""
    axes = layouts.shape[1]
    part = size / _devices_of(layouts)
    price = rng.lognormal(-1, 1, (axes, layouts.max() + 1)) * np.array(_LINK_PRICE[:axes])[:, None]
    price *= rng.random(price.shape) < rng.choice([0.0, 0.5])
    cost = 1e-3 * part * price[np.arange(axes), layouts].sum(axis=1)
    kept_for_backward = index < count // 2 and rng.random() < 0.5
    last = count - index if kept_for_backward else index + int(rng.integers(1, 6))
    usage = UsageTerm(0, index, min(max(index + 1, last), count), part.astype(np.int64))
    return Node(f"op{index}", cost.astype(np.int64), None, (usage,))


def _collectives(layouts: IntArray, wanted: IntArray, size: float) -> IntArray:
    """Return the cost of resharding a tensor from each layout to each target, shape ``(S, T)``, in nanoseconds.

    Per axis: nothing where they agree or a part is cut out, an all-gather where a split ends, else an all-to-all.
    """
    total = np.zeros((len(layouts), len(wanted)))
    for axis, (devices, price) in enumerate(zip(_MESH, _LINK_PRICE, strict=True)):
        if axis < layouts.shape[1]:
            have, want = layouts[:, None, axis], wanted[None, :, axis]
            gathered = (have > 0) & (want == 0)
            exchanged = (have > 0) & (want > 0) & (have != want)
            total += price * (devices - 1) * (gathered + exchanged / devices)
    return (1e-3 * total * (size / _devices_of(layouts))[:, None]).astype(np.int64)


def _devices_of(layouts: IntArray) -> IntArray:
    """Return the number of devices over which each layout splits a tensor."""
    devices: IntArray = np.where(layouts > 0, np.array(_MESH[: layouts.shape[1]]), 1).prod(axis=1)
    return devices


def _tree(rng: np.random.Generator, nodes: int) -> Iterable[Scope]:
    """A tree with short branches, like a transformer's blocks."""
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
    """A tree, and a few hub nodes: every other node is also tied to two hubs."""
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
    """A chain with about one chord per node: low degrees, but no tree and no mergeable ties."""
    chords = {(i, min(nodes - 1, i + 2 + int(rng.integers(_LOCAL_REACH)))) for i in range(nodes - 2)}
    return sorted({(i, i + 1) for i in range(nodes - 1)} | chords)


def _triples(rng: np.random.Generator, nodes: int) -> Iterable[Scope]:
    """Windows of three neighbours."""
    return [(i, i + 1, i + 2) for i in range(nodes - 2)]


def _infeasible(rng: np.random.Generator, nodes: int, strategies: int) -> StrategyProblem:
    """Triangles in which at most one node may be small, with too little memory for that by half a node.

    Neither a single table nor a pairwise relaxation proves it: pair by pair, half of the nodes could be small.
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
        "meshes": Family(
            "hubs, and layouts on a mesh of three axes: over a hundred strategies",
            partial(_mesh_problem, graph=_hubs),
            _shapes((6, 4), (150, 27), (600, 125)),
        ),
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
