"""Decoding by decimation: decide nodes of high degree first, in growing batches, with sweeps in between."""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FloatArray
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.moves import decode_in_order
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.tunables import DECIMATION_BATCHES, PAIRS


def decimate(ascent: PriceAscent, prices: FloatArray, random: np.random.Generator) -> IntArray:
    """Return an assignment decoded at ``prices``; messages and prices of ``ascent`` stay as they are.

    Nodes are taken by falling degree with some noise: what a hub chooses decides most around it, and sweeps let all
    others take notice before they are decided. Sweeps visit the nodes in that order too: behind them the messages to a
    node hold all that those after it would pay.
    """
    graph = ascent.flat.graph
    nodes = len(graph.sizes)
    messages, own = ascent.messages.copy(), ascent.prices
    ascent.prices = prices
    ascent.set_costs()
    unary = ascent.unary.copy()
    degree = np.diff(graph.incident_start) * np.exp(0.3 * random.standard_normal(nodes))
    order = np.argsort(-degree, kind="stable").astype(np.int64)
    choices = ascent.choices.copy()
    decided = np.zeros(nodes, dtype=np.bool_)
    ends = np.unique(np.round(np.geomspace(min(2, nodes), nodes, DECIMATION_BATCHES)).astype(np.int64))
    begin = 0
    for end in ends.tolist():
        for _ in range(PAIRS):
            ascent.sweep_pair(order)
        batch = order[begin:end]
        decode_in_order(graph, unary, ascent.tables, ascent.messages, batch, decided, choices)
        ascent.unary[np.repeat(decided, graph.sizes)] = ascent.flat.penalty
        kept = graph.offset[:-1][decided] + choices[decided]
        ascent.unary[kept] = unary[kept]
        begin = end
    ascent.messages, ascent.prices = messages, own
    ascent.set_costs()
    return choices
