"""What some strategies leave of a problem, as a problem of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from formulations.encodings.flat import FlatProblem
from formulations.presolve import Presolved, presolve
from formulations.presolve.workspace.allowed_strategies import cut_forbidden_strategies
from formulations.problem.strategy_problem import BoolArray, StrategyProblem

Choices = tuple[int, ...]


def presolved_part(
    problem: StrategyProblem, flat: FlatProblem, allowed: BoolArray, deadline: float
) -> tuple[Presolved, Callable[[Choices], Choices]]:
    """Return what some strategies leave of a problem, presolved, and the way back to its strategies.

    Parameters
    ----------
    problem, flat
        The problem and its flat form, without contradiction.
    allowed
        Flags of the strategies, laid out as ``flat.unary``.
    deadline
        When presolve ends, of :func:`time.monotonic`.

    Returns
    -------
    Presolved
        The part; its lift leads to the second value's argument.
    callable
        Maps an assignment of the part before presolve to one of the problem.
    """
    kept = np.split(allowed, flat.graph.offset[1:-1])
    nodes = []
    for node, supported, flags in zip(problem.nodes, flat.supported, kept, strict=True):
        forbidden = np.ones(node.size, dtype=np.bool_)
        forbidden[supported[flags]] = False
        nodes.append(replace(node, forbidden=forbidden))
    cut, lift = cut_forbidden_strategies(replace(problem, nodes=tuple(nodes)))
    return presolve(cut, deadline=deadline), lift
