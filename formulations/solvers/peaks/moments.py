r"""What single moments need at least: a bound on every peak that takes one exact solve each.

.. math:: \min_x \max_t usage_t(x) \;\ge\; \max_t \min_x usage_t(x)

At one moment usage is a cost like any other, so its least is a canonical problem without limits
(:func:`moment_problem`). Nothing counts in it but what is alive then, so presolve removes most of it or all; memory
prices over all moments at once (:mod:`formulations.solvers.peaks.minimum_peak`) begin from what this shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from formulations.problem.strategy_problem import Factor, IntArray, Node, StrategyProblem, UsageTerm


def moment_problem(problem: StrategyProblem, resource: int, time: int) -> StrategyProblem:
    """The problem whose cost is what one resource is used at one time; nothing is limited.

    Parameters
    ----------
    problem
        A validated problem; its costs and limits are left out, its nodes and what is forbidden stay.
    resource
        Index of the resource.
    time
        In ``[0, horizon)``.
    """
    zeros: dict[tuple[int, ...], IntArray] = {}

    def used(table: Node | Factor) -> IntArray:
        total = zeros.setdefault(table.cost.shape, np.zeros(table.cost.shape, dtype=np.int64))
        for term in table.usage:
            if term.resource == resource and term.start <= time < term.end:
                total = total + term.amount
        return total

    nodes = tuple(replace(node, cost=used(node), usage=()) for node in problem.nodes)
    factors = tuple(replace(factor, cost=used(factor), usage=()) for factor in problem.factors)
    return replace(problem, nodes=nodes, factors=factors, resources=(), seconds_per_cost=None)


def busiest_moments(problem: StrategyProblem, resource: int, choices: Sequence[int] | None) -> list[tuple[int, int]]:
    """Times at which the usage of an assignment changes, with the usage from then on, the largest first.

    Parameters
    ----------
    problem, resource
        As for :func:`moment_problem`.
    choices
        The assignment; None for what every table uses at least, whatever is chosen.

    Returns
    -------
    list of tuple of int
        Usage and time, in Python integers; of equal usage the earlier time first.
    """

    def amount_of(scope: tuple[int, ...], term: UsageTerm) -> int:
        if choices is None:
            return int(term.amount.min())
        return int(term.amount[tuple(choices[i] for i in scope)])

    changes: dict[int, int] = {}
    for scope, term in problem.usage_terms():
        if term.resource == resource and term.start < term.end:
            amount = amount_of(scope, term)
            changes[term.start] = changes.get(term.start, 0) + amount
            changes[term.end] = changes.get(term.end, 0) - amount
    usage, found = 0, []
    for time in sorted(changes):
        usage += changes[time]
        if time < problem.horizon:
            found.append((usage, time))
    return sorted(found, key=lambda moment: (-moment[0], moment[1]))
