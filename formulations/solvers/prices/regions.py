"""Prices that weigh differently from region to region, so that memory goes elsewhere.

At the prices of a bound, strategies that use much and little cost nearly the same at many nodes. Which of them get the
memory is all that is left to decide, and moves of one tree cannot exchange it between distant ones. Random weights on
what usage costs in some regions do.
"""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FloatArray
from formulations.problem.strategy_problem import IntArray

_MOST_REGIONS = 16
"""Not tunable: regions of a weight of their own are fewer; with a quarter of them it finds less."""

_SMALLEST = 3
"""Not tunable: nodes of a region, at least; a third of all nodes at most."""

_WEAKEST, _STRONGEST = 1.0, 4.0
"""Not tunable: a weight is at most the exponential of a number between them, at least that of its negative."""


def regional_bias(priced: FloatArray, sizes: IntArray, random: np.random.Generator) -> FloatArray:
    """Return what to add to the costs of strategies, so that usage weighs differently in some regions.

    Parameters
    ----------
    priced
        What the usage of every node's strategies costs, laid out as ``unary`` of the flat problem.
    sizes
        Strategies of every node. A region is a run of consecutive nodes: they are near one another in the graph
        mostly, and in use at the same time.
    random
        Draws regions and weights.
    """
    nodes = len(sizes)
    exponent = np.zeros(nodes)
    strongest = random.uniform(_WEAKEST, _STRONGEST)
    for _ in range(random.integers(1, _MOST_REGIONS)):
        count = int(np.exp(random.uniform(np.log(_SMALLEST), np.log(max(_SMALLEST + 1, nodes / 3)))))
        first = int(random.integers(nodes)) - count // 2
        exponent[max(0, first) : first + count] = random.uniform(-strongest, strongest)
    bias: FloatArray = np.repeat(np.exp(exponent) - 1.0, sizes) * priced
    return bias
