"""Cut forbidden strategies out of all tables.

The other reductions look at whole tables first. Where most strategies of a large problem have just been forbidden,
cutting them out first makes what follows as small as what is left.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from formulations.flat import restricted
from formulations.presolve.lift import Lift
from formulations.problem import Factor, IntArray, StrategyProblem, UsageTerm


def cut_forbidden_strategies(problem: StrategyProblem) -> tuple[StrategyProblem, Lift]:
    """Return the problem over the strategies that are not forbidden, and the way back.

    A node whose strategies are all forbidden keeps them, so that the contradiction can be told.
    """
    kept: list[IntArray] = []
    nodes = []
    for node in problem.nodes:
        allowed = np.arange(node.size) if node.forbidden is None else np.flatnonzero(~node.forbidden)
        if not len(allowed):
            allowed = np.arange(node.size)
        kept.append(allowed.astype(np.int64))
        nodes.append(
            replace(
                node,
                cost=node.cost[allowed],
                forbidden=None if node.forbidden is None else _flags(node.forbidden[allowed]),
                usage=_usage(node.usage, [kept[-1]]),
            )
        )
    factors = tuple(_cut(factor, [kept[i] for i in factor.scope]) for factor in problem.factors)
    lift = Lift(tuple(range(len(nodes))), tuple(kept), (), len(nodes))
    return replace(problem, nodes=tuple(nodes), factors=factors), lift


def _cut(factor: Factor, kept: list[IntArray]) -> Factor:
    return Factor(
        factor.scope,
        restricted(factor.cost, kept),
        None if factor.forbidden is None else _flags(restricted(factor.forbidden, kept)),
        _usage(factor.usage, kept),
    )


def _flags(forbidden: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    return forbidden if forbidden.any() else None


def _usage(terms: tuple[UsageTerm, ...], kept: list[IntArray]) -> tuple[UsageTerm, ...]:
    cut = (UsageTerm(term.resource, term.start, term.end, restricted(term.amount, kept)) for term in terms)
    return tuple(term for term in cut if term.amount.any())
