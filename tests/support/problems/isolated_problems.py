"""Random problems of many small components: isolated nodes with equal intervals, and copies of small graphs."""

from __future__ import annotations

import numpy as np
from support.problems.random_problems import with_limits

from formulations.problem.checker import usage_profile
from formulations.problem.strategy_problem import Factor, Node, Resource, StrategyProblem, UsageTerm

_MOST_ASSIGNMENTS = 2000


def isolated_problem(seed: int) -> StrategyProblem:
    """Return a problem that brute force solves in milliseconds.

    Seeds sweep shared and own intervals, one to three resources, multiples, ties and zeros as amounts, equal
    and different components, forbidden entries, costs beyond int64 in sum, and limits that are absent, exactly
    met, tight, loose, or out of reach.
    """
    rng = np.random.default_rng(seed)
    horizon = int(rng.integers(1, 7))
    resources = int(rng.choice([1, 1, 1, 2, 3]))
    windows = [_interval(rng, horizon, resources) for _ in range(int(rng.integers(1, 4)))]
    unit = int(rng.choice([1, 1, 7, 10**17]))
    costs = str(rng.choice(["plain", "ties", "negative", "huge"]))
    several = float(rng.choice([0.0, 0.5, 1.0]))
    nodes: list[Node] = []
    factors: list[Factor] = []
    combinations = 1
    while True:
        templates, tables = _component(rng, windows, unit, costs, several)
        for _ in range(int(rng.choice([1, 1, 2, 3]))):
            combinations *= int(np.prod([node.size for node in templates]))
            if combinations > _MOST_ASSIGNMENTS:
                return _limited(rng, seed, nodes or templates[:1], factors, resources, horizon)
            first = len(nodes)
            nodes += [Node(f"n{first + k}", node.cost, None, node.usage) for k, node in enumerate(templates)]
            factors += [Factor(tuple(first + i for i in f.scope), f.cost, f.forbidden, f.usage) for f in tables]
        if rng.random() < 0.1:
            return _limited(rng, seed, nodes, factors, resources, horizon)


def _interval(rng: np.random.Generator, horizon: int, resources: int) -> tuple[int, int, int]:
    start = int(rng.integers(0, horizon))
    return int(rng.integers(resources)), start, int(rng.integers(start + 1, horizon + 1))


def _component(
    rng: np.random.Generator, windows: list[tuple[int, int, int]], unit: int, costs: str, several: float
) -> tuple[list[Node], list[Factor]]:
    count = int(rng.integers(2, 5)) if rng.random() < several else 1
    sizes = [int(rng.choice([1, 2, 2, 3, 4])) for _ in range(count)]
    own = windows if rng.random() < 0.3 else [windows[int(rng.integers(len(windows)))]]

    def usage(shape: tuple[int, ...]) -> tuple[UsageTerm, ...]:
        return tuple(UsageTerm(*window, unit * rng.integers(0, 4, shape)) for window in own if rng.random() < 0.8)

    nodes = [Node("", _costs(rng, costs, (size,)), None, usage((size,))) for size in sizes]
    scopes = [(int(rng.integers(i)), i) for i in range(1, count)]
    if count > 2 and rng.random() < 0.5:
        scopes.append(tuple(int(i) for i in rng.permutation(count)[: int(rng.integers(2, 4))]))
    factors = []
    for scope in scopes:
        shape = tuple(sizes[i] for i in scope)
        forbidden = rng.random(shape) < 0.25 if rng.random() < 0.4 else None
        factors.append(Factor(scope, _costs(rng, costs, shape), forbidden, usage(shape) if rng.random() < 0.3 else ()))
    return nodes, factors


def _costs(rng: np.random.Generator, style: str, shape: tuple[int, ...]) -> np.ndarray:
    low, high = {"plain": (0, 30), "ties": (0, 2), "negative": (-9, 9), "huge": (0, 9 * 10**18)}[style]
    return rng.integers(low, high, shape, dtype=np.int64, endpoint=True)


def _limited(
    rng: np.random.Generator, seed: int, nodes: list[Node], factors: list[Factor], resources: int, horizon: int
) -> StrategyProblem:
    free = tuple(Resource(f"r{r}", None) for r in range(resources))
    problem = StrategyProblem(f"isolated-{seed}", tuple(nodes), tuple(factors), free, horizon)
    peaks = [
        [int(profile.max()) for profile in usage_profile(problem, [int(rng.integers(n.size)) for n in nodes])]
        for _ in range(4)
    ]
    limits: list[int | None] = []
    for own in zip(*peaks, strict=True):
        kind = str(rng.choice(["none", "exact", "exact", "tight", "tight", "loose", "below"]))
        limit = {"exact": min(own), "tight": sorted(own)[1], "loose": 2 * max(own), "below": max(0, min(own) - 1)}
        limits.append(limit.get(kind))
    problem = with_limits(problem, limits)
    problem.validate()
    return problem
