"""KIWI's instance as a training step, so that the canonical models (sharding, kiwi_reduced, chains) solve it too.

The paper's memory counts an operator's inputs and output and nothing else: edges whose copies take no bytes are
read in place, so that an input stays until its reader has computed. Values that stay become results at no cost.
"""

from __future__ import annotations

import numpy as np

from formulations.kiwi.graph import KiwiGraph
from formulations.step.training_step import NodeKind, ResultEdge, StepEdge, StepModel, StepNode

_NO_UNIT = 1.0


def step_model(graph: KiwiGraph) -> StepModel:
    """Return a step whose nodes are the graph's operators and whose layouts are their strategies.

    Costs and peaks of its problems are those of :func:`formulations.kiwi.schedule.replay` for the same
    strategies and recomputed operators. Where costs of the graph have no unit, a quantum is one second.
    """
    nodes = []
    for i, operator in enumerate(graph.operators):
        nothing = np.zeros_like(operator.output_bytes)
        is_resident = i < graph.residents
        nodes.append(
            StepNode(
                name=operator.name,
                kind=operator.kind,
                cost=operator.cost,
                output_bytes=(nothing if is_resident else operator.output_bytes)[:, None],
                resident_bytes=operator.output_bytes if is_resident else nothing,
                recomputable=operator.kind is NodeKind.FORWARD and not operator.stays,
            )
        )
    edges = []
    for into in graph.edges_into:
        for slot, edge in enumerate(into):
            nothing = np.zeros_like(edge.cost)
            edges.append(
                StepEdge(edge.producer, 0, edge.consumer, slot, edge.cost, nothing, nothing, nothing.astype(np.bool_))
            )
    results = []
    for i, operator in enumerate(graph.operators):
        if operator.stays:
            nothing = np.zeros_like(operator.cost)
            results.append(ResultEdge(i, 0, nothing, nothing, nothing, nothing.astype(np.bool_)))
    seconds = _NO_UNIT if graph.seconds_per_cost is None else graph.seconds_per_cost
    return StepModel(tuple(nodes), tuple(edges), (), tuple(results), seconds)
