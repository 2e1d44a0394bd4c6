"""Random small training steps as tables, and a replay of KIWI's rules on them that shares no code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import numpy as np

from formulations.models.kiwi_reduced import StepDecision
from formulations.models.step import (
    EventKind,
    GradientEdge,
    NodeKind,
    ResultEdge,
    StepEdge,
    StepModel,
    StepNode,
)


def random_step(seed: int, forward: int = 3, layouts: int = 2) -> StepModel:
    """A random forward chain with skips, its backward, parameters with gradients, and a loss."""
    rng = random.Random(seed)

    def vector(size: int, high: int) -> np.ndarray:
        return np.array([rng.choice([0, rng.randint(0, high)]) for _ in range(size)], dtype=np.int64)

    def tables(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        cost = vector(rows * columns, 9).reshape(rows, columns)
        copy = vector(rows * columns, 5).reshape(rows, columns)
        peak = np.where(copy > 0, copy + rng.randint(0, 3), 0)
        forbidden = np.array([rng.random() < 0.08 for _ in range(rows * columns)]).reshape(rows, columns)
        forbidden[rng.randrange(rows), rng.randrange(columns)] = False
        return cost, copy, peak, forbidden

    nodes: list[StepNode] = []
    nodes.append(StepNode("data", NodeKind.INPUT, vector(1, 0), np.zeros((1, 1), np.int64), vector(1, 4)))
    for k in range(rng.randint(1, 2)):
        size = rng.randint(1, layouts)
        nothing = np.zeros(size, np.int64)
        nodes.append(
            StepNode(
                f"p{k}", NodeKind.PARAMETER, nothing, nothing[:, None], vector(size, 6), vector(size, 3), vector(size, 4)
            )
        )
    first = len(nodes)
    for i in range(forward):
        size = rng.randint(1, layouts)
        outputs = rng.randint(1, 2)
        nodes.append(
            StepNode(
                f"f{i}",
                NodeKind.FORWARD,
                vector(size, 20),
                vector(size * outputs, 9).reshape(size, outputs),
                np.zeros(size, np.int64),
                recomputable=rng.random() < 0.85,
            )
        )
    middle = len(nodes)
    for i in range(forward):
        size = rng.randint(1, layouts)
        nodes.append(
            StepNode(
                f"b{i}", NodeKind.BACKWARD, vector(size, 20), vector(size, 9).reshape(size, 1), np.zeros(size, np.int64)
            )
        )
    edges = []

    def connect(producer: int, consumer: int) -> None:
        output = rng.randrange(nodes[producer].output_bytes.shape[1])
        edges.append(StepEdge(producer, output, consumer, *tables(nodes[producer].size, nodes[consumer].size)))

    for i in range(first, middle):
        connect(rng.randrange(first), i)
        if i > first:
            connect(i - 1, i)
        if i > first + 1 and rng.random() < 0.5:
            connect(rng.randrange(first, i - 1), i)
    for i in range(middle, len(nodes)):
        connect(i - 1, i)
        for j in range(first, middle):
            if rng.random() < 0.5:
                connect(j, i)
        if rng.random() < 0.5:
            connect(rng.randrange(1, first), i)
    gradients = []
    for parameter in range(1, first):
        producer = rng.randrange(middle, len(nodes))
        shape = nodes[producer].size, nodes[parameter].size
        gradients.append(GradientEdge(producer, 0, parameter, *tables(*shape)))
    cost, copy, peak, forbidden = tables(nodes[middle - 1].size, 1)
    results = [ResultEdge(middle - 1, 0, cost[:, 0], copy[:, 0], peak[:, 0], forbidden[:, 0])]
    return StepModel(tuple(nodes), tuple(edges), tuple(gradients), tuple(results))


def decisions(model: StepModel) -> Iterator[StepDecision]:
    """Every combination of layouts and recomputed candidates."""
    candidates = [int(i) for i in np.flatnonzero(model.recompute_candidates)]
    for layouts in product(*(range(node.size) for node in model.nodes)):
        for flags in product((False, True), repeat=len(candidates)):
            yield StepDecision(layouts, frozenset(i for i, flag in zip(candidates, flags, strict=True) if flag))


def replay_rules(model: StepModel, decision: StepDecision) -> tuple[int, list[int]] | None:
    """Cost and bytes at every time by executing the events one by one; None where a rule is broken."""
    layout, again = decision.layouts, decision.recomputed
    for edge in model.edges:
        if edge.forbidden[layout[edge.producer], layout[edge.consumer]]:
            return None
        if edge.producer in again and edge.consumer in again:
            return None  # rule 1
    if any(g.forbidden[layout[g.producer], layout[g.parameter]] for g in model.gradients):
        return None
    if any(r.forbidden[layout[r.producer]] for r in model.results):
        return None

    happened = [
        (position, event)
        for position, event in enumerate(model.timeline.events)
        if event.kind is not EventKind.RECOMPUTE or event.index in again
    ]
    horizon = 2 * len(model.timeline.events)
    usage = [sum(int(node.resident_bytes[layout[i]]) for i, node in enumerate(model.nodes))] * horizon
    cost = 0
    version: dict[tuple[int, int], list[int]] = {}  # (node, output) -> [bytes, created, last read end]
    closed: list[list[int]] = []

    def read(producer: int, output: int, position: int) -> None:
        if (producer, output) in version:
            version[producer, output][2] = 2 * position + 2

    def hold(start: int, end: int, amount: int) -> None:
        for time in range(start, end):
            usage[time] += amount

    update_of = {event.index: position for position, event in happened if event.kind is EventKind.UPDATE}
    for position, event in happened:
        if event.kind in (EventKind.COMPUTE, EventKind.RECOMPUTE):
            i = event.index
            cost += int(model.nodes[i].cost[layout[i]])
            for edge in model.edges:
                if edge.consumer == i:
                    pair = layout[edge.producer], layout[i]
                    cost += int(edge.cost[pair])
                    read(edge.producer, edge.output, position)
                    hold(2 * position, 2 * position + 1, int(edge.peak_bytes[pair]))
                    hold(2 * position + 1, 2 * position + 2, int(edge.copy_bytes[pair]))
            for output, amount in enumerate(model.nodes[i].output_bytes[layout[i]]):
                if (i, output) in version:
                    closed.append(version[i, output])
                version[i, output] = [int(amount), 2 * position + 1, 2 * position + 2]
        elif event.kind is EventKind.GRADIENT:
            gradient = model.gradients[event.index]
            pair = layout[gradient.producer], layout[gradient.parameter]
            cost += int(gradient.cost[pair])
            read(gradient.producer, gradient.output, position)
            hold(2 * position, 2 * position + 1, int(gradient.peak_bytes[pair]))
            hold(2 * position + 1, 2 * position + 2, int(gradient.copy_bytes[pair]))
            own = int(model.nodes[gradient.producer].output_bytes[layout[gradient.producer], gradient.output])
            kept = int(gradient.copy_bytes[pair]) or own
            hold(2 * position + 2, 2 * update_of[gradient.parameter] + 2, kept)
        elif event.kind is EventKind.RESULT:
            result = model.results[event.index]
            at = layout[result.producer]
            cost += int(result.cost[at])
            read(result.producer, result.output, position)
            hold(2 * position, 2 * position + 1, int(result.peak_bytes[at]))
            hold(2 * position + 1, 2 * position + 2, int(result.copy_bytes[at]))
            own = int(model.nodes[result.producer].output_bytes[at, result.output])
            hold(2 * position + 2, horizon, int(result.copy_bytes[at]) or own)
        else:
            node = model.nodes[event.index]
            cost += int(node.update_cost[layout[event.index]])
            hold(2 * position, 2 * position + 2, int(node.update_bytes[layout[event.index]]))
    for amount, created, end in [*closed, *version.values()]:
        hold(created, end, amount)
    return cost, usage
