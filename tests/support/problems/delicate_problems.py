"""Small problems on which tolerances and rounding decide: results in double precision are wrong for some of them.

Costs over nine orders of magnitude in one problem, as those of large collectives beside small ones; limits that one
byte in 1e12 misses or meets; sums of costs that differ by one; tables with the same rows in another order; usages
around powers of two beyond what a double holds exactly.
"""

from __future__ import annotations

import numpy as np

from formulations.problem.checker import usage_profile
from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm

KINDS = ("magnitudes", "one byte", "near ties", "permuted", "beyond doubles")


def delicate_problem(seed: int) -> StrategyProblem:
    """A problem of at most 1024 assignments."""
    rng = np.random.default_rng([seed, 77])
    kind = KINDS[int(rng.integers(len(KINDS)))]
    count = int(rng.integers(2, 6))
    size, horizon = 4 if count < 5 else 3, int(rng.integers(1, 5))
    table = _costs(rng, kind, (size, size))
    nodes = []
    for i in range(count):
        start = int(rng.integers(horizon))
        term = UsageTerm(0, start, int(rng.integers(start, horizon)) + 1, _amounts(rng, kind, size))
        nodes.append(Node(f"n{i}", _costs(rng, kind, (size,)), None, (term,)))
    scopes = [(i, j) for i in range(count) for j in range(i + 1, count) if j == i + 1 or rng.random() < 0.4]
    factors = []
    for scope in scopes:
        cost = table[rng.permutation(size)] if kind == "permuted" else _costs(rng, kind, (size, size))
        factors.append(Factor(scope, cost))
    free = StrategyProblem(f"delicate-{seed}", tuple(nodes), tuple(factors), (Resource("memory", None),), horizon)
    chosen = tuple(int(rng.integers(size)) for _ in nodes)
    peak = int(usage_profile(free, chosen)[0].max())
    limit = max(0, peak - int(rng.integers(0, 2)))  # just met by these choices, or missed by one
    problem = StrategyProblem(free.name, free.nodes, free.factors, (Resource("memory", limit),), horizon)
    problem.validate()
    return problem


def _costs(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> IntArray:
    if kind == "magnitudes":
        return np.rint(10.0 ** rng.uniform(0, 9, shape)).astype(np.int64)
    if kind == "near ties":
        return 10**6 + rng.integers(0, 2, shape)
    return rng.integers(0, 50, shape)


def _amounts(rng: np.random.Generator, kind: str, size: int) -> IntArray:
    if kind == "one byte":
        return 10**12 // 4 + rng.integers(-1, 2, size)
    if kind == "beyond doubles":
        return (1 << rng.integers(53, 58, size)) + rng.integers(-1, 2, size)
    return rng.integers(0, 100, size)
