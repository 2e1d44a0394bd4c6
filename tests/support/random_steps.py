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
                f"p{k}",
                NodeKind.PARAMETER,
                nothing,
                nothing[:, None],
                vector(size, 6),
                vector(size, 3),
                vector(size, 4),
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
    edges: list[StepEdge] = []

    def connect(producer: int, consumer: int) -> None:
        output = rng.randrange(nodes[producer].output_bytes.shape[1])
        slot = sum(edge.consumer == consumer for edge in edges)
        edges.append(StepEdge(producer, output, consumer, slot, *tables(nodes[producer].size, nodes[consumer].size)))

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
        producer = gradients[0].producer if gradients and rng.random() < 0.4 else rng.randrange(middle, len(nodes))
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

    timeline = model.timeline
    happened = [
        (position, event)
        for position, event in enumerate(timeline.events)
        if event.kind is not EventKind.RECOMPUTE or event.index in again
    ]
    usage = [sum(int(node.resident_bytes[layout[i]]) for i, node in enumerate(model.nodes))] * timeline.horizon
    cost = 0
    version: dict[tuple[int, int], list[int]] = {}  # (node, output) -> [bytes, created, end of the last read]
    closed: list[list[int]] = []
    held = held_outputs(model)

    def read(producer: int, output: int, end: int) -> None:
        if (producer, output) in version:
            entry = version[producer, output]
            entry[2] = max(entry[2], end)

    def hold(start: int, end: int, amount: int) -> None:
        for time in range(start, end):
            usage[time] += amount

    update_of = {
        event.index: timeline.start[position] for position, event in happened if event.kind is EventKind.UPDATE
    }
    for position, event in happened:
        start, computed = timeline.start[position], timeline.start[position + 1]
        if event.kind in (EventKind.COMPUTE, EventKind.RECOMPUTE):
            i = event.index
            cost += int(model.nodes[i].cost[layout[i]])
            for edge in model.edges:
                if edge.consumer == i:
                    pair = layout[edge.producer], layout[i]
                    cost += int(edge.cost[pair])
                    copied = int(edge.copy_bytes[pair]) > 0
                    # What may be held for recomputed readers is counted through the computation in any case.
                    through = not copied or ((edge.producer, edge.output) in held and edge.producer not in again)
                    read(edge.producer, edge.output, computed if through else start + edge.slot + 1)
                    hold(start + edge.slot, start + edge.slot + 1, int(edge.peak_bytes[pair]))
                    hold(start + edge.slot + 1, computed, int(edge.copy_bytes[pair]))
            for output, amount in enumerate(model.nodes[i].output_bytes[layout[i]]):
                if (i, output) in version:
                    closed.append(version[i, output])
                version[i, output] = [int(amount), computed - 1, computed]
        elif event.kind is EventKind.GRADIENT:
            gradient = model.gradients[event.index]
            pair = layout[gradient.producer], layout[gradient.parameter]
            cost += int(gradient.cost[pair])
            read(gradient.producer, gradient.output, start + 1)
            hold(start, start + 1, int(gradient.peak_bytes[pair]))
            end = update_of[gradient.parameter] + 1
            if gradient.copy_bytes[pair]:
                hold(start + 1, end, int(gradient.copy_bytes[pair]))
            else:
                read(gradient.producer, gradient.output, end)
        elif event.kind is EventKind.RESULT:
            result = model.results[event.index]
            at = layout[result.producer]
            cost += int(result.cost[at])
            read(result.producer, result.output, start + 1)
            hold(start, start + 1, int(result.peak_bytes[at]))
            if result.copy_bytes[at]:
                hold(start + 1, timeline.horizon, int(result.copy_bytes[at]))
            else:
                read(result.producer, result.output, timeline.horizon)
        else:
            node = model.nodes[event.index]
            cost += int(node.update_cost[layout[event.index]])
            hold(start, start + 1, int(node.update_bytes[layout[event.index]]))
    for amount, created, end in [*closed, *version.values()]:
        hold(created, end, amount)
    return cost, usage


def held_outputs(model: StepModel) -> set[tuple[int, int]]:
    """Outputs that live on as a gradient or result, or that a recomputation reads after their last use otherwise."""
    timeline = model.timeline
    last: dict[tuple[int, int], int] = {}
    for edge in model.edges:
        key = edge.producer, edge.output
        last[key] = max(last.get(key, 0), timeline.compute[edge.consumer])
    for k, gradient in enumerate(model.gradients):
        key = gradient.producer, gradient.output
        last[key] = max(last.get(key, 0), timeline.gradient[k])
    for k, result in enumerate(model.results):
        key = result.producer, result.output
        last[key] = max(last.get(key, 0), timeline.result[k])
    lives_on = {(edge.producer, edge.output) for edge in (*model.gradients, *model.results)}
    return lives_on | {
        (edge.producer, edge.output)
        for edge in model.edges
        if timeline.recompute[edge.consumer] > last[edge.producer, edge.output]
    }
