r"""Strategies and combinations that no better assignment can contain, by prices and messages.

With the reparametrised tables :math:`\theta \ge 0` over a bound :math:`B`, an assignment within the limits that
gives strategy ``s`` to node ``i`` costs at least

.. math:: B + \theta_i(s) + \sum_{f \ni i} \min_y \theta_f(s, y) .

Where that is above the incumbent's cost, ``s`` may be forbidden: what remains still contains the incumbent and every
better assignment. Combinations of two nodes are judged alike, with the minima over the other factors of both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray
from formulations.problem.strategy_problem import BoolArray, StrategyProblem
from formulations.solvers.prices.dual_bound import Reparametrised, reparametrise
from formulations.solvers.prices.integer_bound import IntegerBound, holds_exact_costs, integer_bound

_PAIR = 2
"""Not tunable: nodes of a pair."""

_PARTS = 256
"""Not tunable: parts of a gap, one of which is exact enough."""


def fix_by_reduced_cost(
    problem: StrategyProblem, flat: FlatProblem, prices: FloatArray, messages: FloatArray, objective: int
) -> StrategyProblem:
    """Forbid all that cannot be part of an assignment that costs at most ``objective``.

    Parameters
    ----------
    flat
        Of ``problem``, without contradiction.
    prices, messages
        As for :func:`formulations.solvers.prices.dual_bound.exact_bound`.

    Returns
    -------
    StrategyProblem
        The same nodes and strategies with more of them forbidden.
    """
    theta = reparametrise(problem, flat, prices, messages)
    room = objective * theta.scale - theta.bound
    least = [
        [table.min(axis=tuple(k for k in range(table.ndim) if k != axis)) for axis in range(table.ndim)]
        for table in theta.tables
    ]
    total = list(theta.nodes)
    pairwise = list(theta.nodes)
    for group, minima in zip(flat.groups, least, strict=True):
        for i, minimum in zip(group.scope, minima, strict=True):
            total[i] = total[i] + minimum
            if len(group.scope) == _PAIR:
                pairwise[i] = pairwise[i] + minimum
    nodes = list(problem.nodes)
    for i, (values, kept) in enumerate(zip(total, flat.supported, strict=True)):
        forbidden = np.ones(nodes[i].size, dtype=np.bool_)
        forbidden[kept] = np.asarray(values > room, dtype=np.bool_)
        nodes[i] = replace(nodes[i], forbidden=forbidden)
    factors = list(problem.factors)
    for g, group in enumerate(flat.groups):
        if len(group.scope) != _PAIR:
            continue
        hopeless = _hopeless_pairs(
            theta, g, [pairwise[i] - own for i, own in zip(group.scope, least[g], strict=True)], room
        )
        factor = factors[group.members[0]]
        flags = np.zeros(factor.cost.shape, np.bool_) if factor.forbidden is None else factor.forbidden.copy()
        oriented = group.oriented(0, flags)
        oriented[np.ix_(*(flat.supported[i] for i in group.scope))] |= hopeless
        factors[group.members[0]] = replace(factor, forbidden=flags)
    return replace(problem, nodes=tuple(nodes), factors=tuple(factors))


def judged(flat: FlatProblem, prices: FloatArray, messages: FloatArray) -> IntegerBound | None:
    """Return what strategies cost beyond the bound; None where costs are beyond the range of doubles."""
    return integer_bound(flat, prices, messages) if holds_exact_costs(flat) else None


def entries_left(flat: FlatProblem, proof: IntegerBound | None, objective: int) -> int:
    """Return how many entries the tables have between strategies that may be part of a better assignment.

    An estimate from above, of a problem without contradiction: strategies are judged by themselves, and all are kept
    where nothing is known of them.
    """
    graph = flat.graph
    kept = graph.sizes
    if proof is not None:
        hopeful = proof.excess < proof.hopeless_from(objective)
        kept = np.add.reduceat(hopeful.astype(np.int64), graph.offset[:-1])
    entries = np.where(graph.scope >= 0, kept[graph.scope], 1).prod(axis=1)
    return int(entries.sum())


def largest_objective(flat: FlatProblem, proof: IntegerBound, most_entries: float, below: int) -> int | None:
    """Return the largest cost up to ``below`` that leaves at most so many entries; None where the bound leaves more."""
    low, high = proof.bound, below
    if entries_left(flat, proof, below) <= most_entries:
        return below
    if low >= high or entries_left(flat, proof, low + 1) > most_entries:
        return None
    while high - low > max(1, (below - proof.bound) // _PARTS):
        middle = (low + high) // 2
        if entries_left(flat, proof, middle) <= most_entries:
            low = middle
        else:
            high = middle
    return low


def _hopeless_pairs(theta: Reparametrised, group: int, others: list[FloatArray], room: int) -> BoolArray:
    first, second = others
    return np.asarray(theta.tables[group] + first[:, None] + second[None, :] > room, dtype=np.bool_)
