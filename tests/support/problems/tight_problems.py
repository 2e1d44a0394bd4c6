"""Random canonical problems that presolve leaves something of: memory binds at several times, cheap is large."""

from __future__ import annotations

import math

import numpy as np
from support.problems.random_problems import with_limits

from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm

MOST_ASSIGNMENTS = 3000
_HORIZON = 6
_STRUCTURES = ("chain", "tree", "cycle", "clique", "clique", "hub", "hyper", "none")


def tight_problem(seed: int) -> StrategyProblem:
    """Return a small problem in which memory matters, so that presolve cannot solve it alone.

    Seeds sweep chains, trees, cycles, cliques, hubs with parallel tables, and hypergraphs; one or two
    resources; usage on factors; forbidden entries; strategies of zero usage; ties, negative costs and
    costs and amounts near 10^18; and limits between "one assignment fits exactly", "nothing fits by
    one unit" and nearly loose.
    """
    rng = np.random.default_rng([seed, 7])
    sizes = _sizes(rng)
    scopes = _scopes(rng, len(sizes))
    resources = tuple(Resource(f"r{r}", None) for r in range(int(rng.choice([1, 1, 2]))))
    scale = _Scale(rng)
    forbidden_share = float(rng.choice([0.0, 0.0, 0.1, 0.3]))
    usage_share = float(rng.choice([0.0, 0.0, 0.3]))
    nodes = tuple(_node(rng, i, size, len(resources), scale) for i, size in enumerate(sizes))
    factors = []
    for scope in scopes:
        shape = tuple(sizes[i] for i in scope)
        flags = rng.random(shape) < forbidden_share if forbidden_share and rng.random() < 0.5 else None
        usage = (_term(rng, scale.amounts(rng, shape), len(resources)),) if rng.random() < usage_share else ()
        factors.append(Factor(scope, scale.costs(rng, shape), flags, usage))
    free = StrategyProblem(f"tight-{seed}", nodes, tuple(factors), resources, _HORIZON)
    problem = with_limits(free, [_limit(rng, free, r) for r in range(len(resources))])
    problem.validate()
    return problem


class _Scale:
    """How large costs and amounts are, one draw per problem."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.low, self.high = {
            "plain": (0, 1000),
            "ties": (0, 2),
            "negative": (-500, 500),
            "huge": (0, 10**18),
        }[str(rng.choice(["plain", "plain", "plain", "ties", "negative", "huge"]))]
        self.near_ties = rng.random() < 0.1
        self.most = {"plain": 100, "ties": 2, "huge": 10**18}[str(rng.choice(["plain", "plain", "ties", "huge"]))]

    def costs(self, rng: np.random.Generator, shape: tuple[int, ...]) -> IntArray:
        """Costs; near ties differ by less than doubles of their size can tell."""
        if self.near_ties:
            return rng.integers(0, 3, shape) * 10**17 + rng.integers(0, 6, shape)
        return rng.integers(self.low, self.high, shape, dtype=np.int64, endpoint=True)

    def amounts(self, rng: np.random.Generator, shape: tuple[int, ...]) -> IntArray:
        amounts = rng.integers(0, self.most, shape, dtype=np.int64, endpoint=True)
        amounts[rng.random(shape) < 0.1] = 0
        return amounts


def _sizes(rng: np.random.Generator) -> list[int]:
    count = int(rng.integers(2, 9))
    sizes: list[int] = []
    for _ in range(count):
        size = int(rng.choice([2, 2, 3, 3, 4, 5]))
        sizes.append(size if math.prod(sizes) * size <= MOST_ASSIGNMENTS else 1)
    return sizes


def _scopes(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    structure = str(rng.choice(_STRUCTURES))
    if structure == "tree":
        scopes = [(int(rng.integers(i)), i) for i in range(1, count)]
    elif structure == "clique":
        scopes = [(i, j) for i in range(count) for j in range(i)]
    elif structure == "hub":
        scopes = [(0, i) for i in range(1, count)] + [(i, 0) for i in range(1, count, 2)]
    elif structure == "hyper":
        arities = np.minimum(rng.integers(1, 4, 2 * count), count)
        scopes = [tuple(int(i) for i in rng.choice(count, arity, replace=False)) for arity in arities]
    elif structure == "none":
        scopes = []
    else:
        scopes = [(i, i + 1) for i in range(count - 1)]
        if structure == "cycle" and count > 2:
            scopes.append((count - 1, 0))
    return scopes


def _node(rng: np.random.Generator, i: int, size: int, resources: int, scale: _Scale) -> Node:
    """A node whose cheap strategies are mostly its large ones."""
    cost = np.sort(scale.costs(rng, (size,)))
    amount = np.sort(scale.amounts(rng, (size,)))[::-1].copy()
    order = rng.permutation(size)
    usage = [_term(rng, amount[order], resources)]
    if rng.random() < 0.4:
        usage.append(_term(rng, scale.amounts(rng, (size,)), resources))
    flags = rng.random(size) < 0.2 if size > 1 and rng.random() < 0.1 else None
    return Node(f"n{i}", cost[order], flags, tuple(usage))


def _term(rng: np.random.Generator, amount: IntArray, resources: int) -> UsageTerm:
    start = int(rng.integers(0, _HORIZON - 1))
    return UsageTerm(int(rng.integers(resources)), start, int(rng.integers(start + 1, _HORIZON + 1)), amount)


def _limit(rng: np.random.Generator, problem: StrategyProblem, resource: int) -> int | None:
    """A limit at a quantile of the peaks of all assignments: the lowest ones bind hardest."""
    peaks = np.sort(_all_peaks(problem, resource))
    kind = str(rng.choice(["least", "below", "tight", "tight", "tight", "middle", "middle", "none"]))
    if kind == "none":
        return None
    if kind == "below":
        return max(0, int(peaks[0]) - 1)
    share = {"least": 0.0, "tight": 0.1, "middle": 0.5}[kind] * rng.random()
    return int(peaks[int(share * (len(peaks) - 1))])


def _all_peaks(problem: StrategyProblem, resource: int) -> np.ndarray:
    """Largest usage over time of every assignment, as Python integers: sums may leave int64."""
    sizes = [node.size for node in problem.nodes]
    choices = np.unravel_index(np.arange(math.prod(sizes)), sizes)
    usage = np.zeros((problem.horizon, len(choices[0])), dtype=np.object_)
    for scope, term in problem.usage_terms():
        if term.resource == resource:
            usage[term.start : term.end] += term.amount[tuple(choices[i] for i in scope)].astype(np.object_)
    return usage.max(axis=0)
