"""Random small training steps as tables, and every decision over them."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from formulations.step.modes import Modes
from formulations.step.training_step import (
    GradientEdge,
    NodeKind,
    ResultEdge,
    StepDecision,
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
    return StepModel(_with_workspaces(nodes, seed), tuple(edges), tuple(gradients), tuple(results))


def _with_workspaces(nodes: list[StepNode], seed: int) -> tuple[StepNode, ...]:
    """The nodes, some operators among them with bytes that they hold while they run."""
    rng = random.Random(f"workspaces of {seed}")

    def changed(node: StepNode) -> StepNode:
        if node.kind not in (NodeKind.FORWARD, NodeKind.BACKWARD) or rng.random() < 0.5:
            return node
        return replace(node, workspace_bytes=np.array([rng.choice((0, 3, 12)) for _ in range(node.size)], np.int64))

    return tuple(map(changed, nodes))


def decisions(model: StepModel, modes: Modes) -> Iterator[StepDecision]:
    """Every combination of layouts and of reruns, also those that cannot be executed."""
    nodes = sorted(modes)
    for layouts in product(*(range(node.size) for node in model.nodes)):
        for chosen in product(*(((), *modes[i]) for i in nodes)):
            yield StepDecision(layouts, {i: mode for i, mode in zip(nodes, chosen, strict=True) if mode})


def reads_last_copies(model: StepModel, decision: StepDecision, but: Collection[int] = ()) -> bool:
    """Whether backward and the reruns read the last copy alone of whatever runs again, but for some operators."""
    for edge in model.edges:
        made = decision.recomputed.get(edge.producer)
        reads = [*decision.recomputed.get(edge.consumer, ())]
        if model.nodes[edge.consumer].kind is NodeKind.BACKWARD:
            reads.append(edge.consumer)
        if made and edge.producer not in but and any(read < made[-1] for read in reads):
            return False
    return True
