"""Random canonical problems by seed: small ones for brute force, larger ones shaped like a training step.

The same seed gives the same problem on every machine with the same version of NumPy. The families that
``meshwright bench random`` runs are in :mod:`formulations.instances.random_families`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from formulations.problem.checker import usage_profile
from formulations.problem.strategy_problem import (
    BoolArray,
    Factor,
    IntArray,
    Node,
    Resource,
    StrategyProblem,
    UsageTerm,
)

Size = Literal["tiny", "small"]
_MAX_ASSIGNMENTS = {"tiny": 60, "small": 1500}


def random_problem(seed: int, size: Size = "small") -> StrategyProblem:
    """Return a valid problem that brute force solves in milliseconds.

    Seeds sweep chains, trees, cliques, cycles and hypergraphs; no, one or several resources; usage on
    nodes and factors; forbidden entries; zero usage; ties; negative and very large costs; limits that
    are absent, loose, exactly met, or out of reach; single nodes and single strategies.

    Parameters
    ----------
    seed
        Non-negative seed of everything.
    size
        At most 60 assignments for ``tiny``, 1500 for ``small``.
    """
    rng = np.random.default_rng(seed)
    sizes = _node_sizes(rng, _MAX_ASSIGNMENTS[size])
    horizon = int(rng.integers(1, 9))
    resource_count = int(rng.choice([0, 1, 1, 1, 2, 3]))
    cost_style = str(rng.choice(["plain", "plain", "ties", "zero", "negative", "huge"]))
    amount_style = str(rng.choice(["plain", "plain", "ties", "zero", "huge"]))
    forbidden_share = float(rng.choice([0.0, 0.0, 0.1, 0.35]))

    def usage(shape: tuple[int, ...], most: int) -> tuple[UsageTerm, ...]:
        if not resource_count:
            return ()
        terms = []
        for _ in range(int(rng.integers(0, most + 1))):
            start = int(rng.integers(0, horizon + 1))
            end = int(rng.integers(start, horizon + 1))
            resource = int(rng.integers(resource_count))
            terms.append(UsageTerm(resource, start, end, _amounts(rng, amount_style, shape)))
        return tuple(terms)

    nodes = tuple(
        Node(f"n{i}", _costs(rng, cost_style, (s,)), _forbidden(rng, forbidden_share / 2, (s,)), usage((s,), 3))
        for i, s in enumerate(sizes)
    )
    factors = []
    for scope in _scopes(rng, len(sizes)):
        shape = tuple(sizes[i] for i in scope)
        most = 2 if rng.random() < 0.4 else 0
        flags = _forbidden(rng, forbidden_share, shape)
        factors.append(Factor(scope, _costs(rng, cost_style, shape), flags, usage(shape, most)))
    free = tuple(Resource(f"r{r}", None) for r in range(resource_count))
    problem = StrategyProblem(f"random-{size}-{seed}", nodes, tuple(factors), free, horizon)
    problem = with_limits(problem, [_limit(rng, problem, r) for r in range(resource_count)])
    problem.validate()
    return problem


def training_step_problem(
    seed: int,
    operators: int = 200,
    strategies: int = 6,
    memory: float = 0.4,
    factor_usage: bool = True,
    forbidden_share: float = 0.0,
) -> StrategyProblem:
    """Return a problem shaped like a training step: forward chain, mirrored backward chain, skip edges.

    Strategies trade time for memory; an activation lives from its forward operator to the mirrored
    backward operator.

    Parameters
    ----------
    seed
        Non-negative seed of everything.
    operators, strategies
        Number of nodes, and of strategies of each.
    memory
        Position of the limit between the peak of the choices of least memory (0) and the peak of the cheapest
        choices (1).
    factor_usage
        Whether half of the reshardings need a buffer.
    forbidden_share
        Share of forbidden entries of factors; a factor never forbids the first strategy of a node.
    """
    rng = np.random.default_rng(seed)
    forward = operators // 2
    layout = [rng.integers(0, 4, strategies) for _ in range(operators)]
    nodes = []
    for i in range(operators):
        size, cost, held = operator_tables(rng, strategies)
        last = 2 * forward - i if i < forward else min(operators, i + int(rng.integers(2, 6)))
        terms = [UsageTerm(0, i, max(i + 1, min(last, operators)), held)]
        terms.append(UsageTerm(0, i, i + 1, (size * rng.uniform(0, 0.5, strategies)).astype(np.int64)))
        nodes.append(Node(f"op{i}", cost, None, tuple(terms)))
    scopes = {(i - 1, i) for i in range(1, operators)}
    scopes |= {
        (2 * forward - 1 - i, i) for i in range(forward, min(2 * forward, operators)) if 2 * forward - 1 - i < i - 1
    }
    scopes |= {(i, i + int(rng.integers(2, 8))) for i in range(0, operators - 8, 5)}
    factors = []
    for first, second in sorted(scopes):
        moved, cost = resharding_tables(rng, layout[first], layout[second])
        flags = (rng.random(moved.shape) < forbidden_share) if forbidden_share else None
        if flags is not None:
            flags[:, 0] = False
            flags[0, :] = False
        buffer = (moved * float(rng.lognormal(16, 1))).astype(np.int64)
        usage = (UsageTerm(0, second, second + 1, buffer),) if factor_usage and rng.random() < 0.5 else ()
        factors.append(Factor((first, second), cost, flags, usage))
    free = (Resource("memory", None),)
    problem = StrategyProblem(f"step-{operators}x{strategies}-{seed}", tuple(nodes), tuple(factors), free, operators)
    smallest = [int(np.argmin(node.usage[0].amount)) for node in nodes]
    cheapest = [int(np.argmin(node.cost)) for node in nodes]
    low, high = (int(usage_profile(problem, choices)[0].max()) for choices in (smallest, cheapest))
    problem = with_limits(problem, [low + int(memory * max(0, high - low))])
    problem.validate()
    return problem


def operator_tables(rng: np.random.Generator, strategies: int) -> tuple[float, IntArray, IntArray]:
    """Draw an operator whose strategies trade time for memory.

    Returns
    -------
    size, cost, held
        Bytes of the whole result; costs (nanoseconds) and bytes held, each of shape ``(strategies,)``.
    """
    size = float(rng.lognormal(17, 1))
    share = np.exp(-rng.uniform(0, 2.5, strategies))
    time = float(rng.lognormal(11, 0.7)) * (1 + rng.uniform(0.2, 1.0) * (1 - share) + rng.uniform(0, 0.1, strategies))
    return size, time.astype(np.int64), (size * share).astype(np.int64)


def resharding_tables(rng: np.random.Generator, first: IntArray, second: IntArray) -> tuple[BoolArray, IntArray]:
    """Draw the cost of resharding from one operator's layout to another's; zero where they are equal.

    Parameters
    ----------
    first, second
        Layout of every strategy of the two operators, shapes ``(S,)`` and ``(T,)``.

    Returns
    -------
    moved, cost
        Whether a tensor is moved, and its price (nanoseconds), each of shape ``(S, T)``.
    """
    moved = first[:, None] != second[None, :]
    price = float(rng.lognormal(10.5, 0.7))
    return moved, (moved * price * rng.uniform(0.5, 1.5, moved.shape)).astype(np.int64)


def with_limits(problem: StrategyProblem, limits: Sequence[int | None]) -> StrategyProblem:
    """Return the problem with other limits, one per resource."""
    resources = tuple(Resource(r.name, limit) for r, limit in zip(problem.resources, limits, strict=True))
    return StrategyProblem(problem.name, problem.nodes, problem.factors, resources, problem.horizon)


def _node_sizes(rng: np.random.Generator, most: int) -> list[int]:
    count = int(rng.choice([1, 2, 3, 4, 5, 6, 7]))
    sizes: list[int] = []
    product = 1
    for _ in range(count):
        size = int(rng.choice([1, 2, 2, 3, 3, 4, 6]))
        if product * size > most:
            size = 1
        product *= size
        sizes.append(size)
    return sizes


def _scopes(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    structure = str(rng.choice(["chain", "tree", "clique", "cycle", "random", "hyper", "none"]))
    scopes: list[tuple[int, ...]] = []
    if structure in ("chain", "cycle"):
        scopes = [(i, i + 1) for i in range(count - 1)]
        if structure == "cycle" and count > 2:
            scopes.append((count - 1, 0))
    elif structure == "tree":
        scopes = [(i, int(rng.integers(i))) for i in range(1, count)]
    elif structure == "clique":
        scopes = [(i, j) for i in range(count) for j in range(i)]
    elif structure in ("random", "hyper"):
        for _ in range(int(rng.integers(0, 2 * count + 1))):
            arity = min(count, int(rng.integers(1, 4 if structure == "hyper" else 3)))
            scopes.append(tuple(int(i) for i in rng.choice(count, arity, replace=False)))
    if scopes and rng.random() < 0.25:
        scopes.append(tuple(reversed(scopes[0])))
    if rng.random() < 0.25:
        scopes.append((int(rng.integers(count)),))
    return scopes


def _costs(rng: np.random.Generator, style: str, shape: tuple[int, ...]) -> IntArray:
    if style == "zero":
        return np.zeros(shape, dtype=np.int64)
    low, high = {"plain": (0, 1000), "ties": (0, 3), "negative": (-500, 500), "huge": (0, 10**18)}[style]
    return rng.integers(low, high, shape, dtype=np.int64, endpoint=True)


def _amounts(rng: np.random.Generator, style: str, shape: tuple[int, ...]) -> IntArray:
    if style == "zero":
        return np.zeros(shape, dtype=np.int64)
    high = {"plain": 100, "ties": 2, "huge": 4 * 10**18}[style]
    amounts = rng.integers(0, high, shape, dtype=np.int64, endpoint=True)
    amounts[rng.random(shape) < 0.2] = 0
    return amounts


def _forbidden(rng: np.random.Generator, share: float, shape: tuple[int, ...]) -> BoolArray | None:
    return rng.random(shape) < share if share and rng.random() < 0.7 else None


def _limit(rng: np.random.Generator, problem: StrategyProblem, resource: int) -> int | None:
    """A limit drawn around the peaks of random assignments: exactly met, loose, tight, out of reach, or none."""
    peaks = []
    for _ in range(4):
        choices = [int(rng.integers(node.size)) for node in problem.nodes]
        peaks.append(int(usage_profile(problem, choices)[resource].max()))
    kind = str(rng.choice(["none", "exact", "tight", "tight", "loose", "below"]))
    if kind == "none":
        return None
    if kind == "loose":
        return max(peaks) * 2
    if kind == "below":
        return max(0, min(peaks) - 1)
    return min(peaks) if kind == "exact" else sorted(peaks)[1]
