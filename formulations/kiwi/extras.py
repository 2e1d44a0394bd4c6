"""Bytes that the paper does not count: resharded copies, workspaces, and gradients in the layout of their parameter.

An operator runs in phases, and each of its extras is held in one. ``BEFORE``: its inputs are there, its output is not
yet, and one of them after the other is copied into its layout. ``DURING``: inputs, all copies, workspace and output. An
input whose copy is there is freed at once, unless something reads it later.
``AFTER``: inputs without a later use are freed, and gradients and results are brought to their layout. ``KEPT`` is what
is held from then on to the end of the step, less the storage that it replaces, so that it may be negative.

With all of them no decision of a program holds more when the step is executed, but for the extra bytes of updates,
which fused optimizers do not have. It may hold less, as all outputs of an operator are held as long as one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from formulations.problem.strategy_problem import BoolArray, IntArray
from formulations.step.training_step import GradientEdge, NodeKind, ResultEdge, StepEdge, StepModel

Pairs = Mapping[int, IntArray]
"""Bytes by producer, each of shape ``(S_producer, S_operator)``."""


class Phase(StrEnum):
    """When an extra is held; see the module docstring."""

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"
    KEPT = "kept"


@dataclass(frozen=True, slots=True, eq=False)
class Extra:
    """What an operator holds in one phase beside outputs.

    Parameters
    ----------
    operator
        The operator; of phases after it has run only one whose output stays.
    phase
        When. Extras of one phase are held one after the other, not together.
    own
        Bytes by strategy of the operator, shape ``(S,)``.
    pairs
        Bytes by producer that it has an edge from, and by pair of strategies.
    freed
        By producer that runs itself, the pairs of strategies under which its output is no longer held for this
        operator, which has a copy.
    """

    operator: int
    phase: Phase
    own: IntArray
    pairs: Pairs
    freed: Mapping[int, BoolArray] = field(default_factory=dict)

    @property
    def tables(self) -> tuple[IntArray, ...]:
        """All tables of bytes."""
        return (self.own, *self.pairs.values())

    def key(self, operator: int, strategy: int) -> tuple[bytes, ...]:
        """Equal for strategies of an operator that no bytes of this extra distinguish."""
        tables = (*self.pairs.items(), *self.freed.items())
        if self.operator == operator:
            return (self.own[strategy].tobytes(), *(table[:, strategy].tobytes() for _, table in tables))
        return tuple(table[strategy].tobytes() for j, table in tables if j == operator)

    def bytes_of(self, strategies: Sequence[int]) -> int:
        """Bytes under one strategy per operator."""
        own = strategies[self.operator]
        return int(self.own[own]) + sum(int(table[strategies[j], own]) for j, table in self.pairs.items())


def extras_of(model: StepModel) -> tuple[Extra, ...]:
    """Return the extras of a step; operators and strategies have the numbers of its nodes and layouts."""
    ends: list[StepEdge | GradientEdge | ResultEdge] = [*model.edges, *model.gradients, *model.results]
    readers = Counter((end.producer, end.output) for end in ends)
    running = (i for i, node in enumerate(model.nodes) if node.kind in (NodeKind.FORWARD, NodeKind.BACKWARD))
    found = [extra for i in running for extra in (*_of_arguments(model, i), *_of_ends(model, i, readers))]
    return tuple(extra for extra in found if any(table.any() for table in extra.tables))


def _of_arguments(model: StepModel, i: int) -> Iterator[Extra]:
    """What is held while arguments are copied, one by one, and while the operator computes."""
    node, nothing = model.nodes[i], np.zeros(model.nodes[i].size, np.int64)
    workspace = nothing if node.workspace_bytes is None else node.workspace_bytes
    copies: Pairs = {}
    edges = sorted((edge for edge in model.edges if edge.consumer == i), key=lambda edge: edge.slot)
    for done, edge in enumerate(edges):
        yield Extra(i, Phase.BEFORE, nothing, _with(copies, edge.producer, edge.peak_bytes), _freed(model, edges, done))
        copies = _with(copies, edge.producer, edge.copy_bytes)
    yield Extra(i, Phase.DURING, workspace, copies, _freed(model, edges, len(edges)))


def _freed(model: StepModel, edges: Sequence[StepEdge], done: int) -> dict[int, BoolArray]:
    """Producers that are read by none but the first edges, under the pairs of layouts where all of these copy."""
    running = (NodeKind.FORWARD, NodeKind.BACKWARD)
    found: dict[int, BoolArray] = {}
    for j in {edge.producer for edge in edges[:done]} - {edge.producer for edge in edges[done:]}:
        if model.nodes[j].kind in running:
            found[j] = np.logical_and.reduce([edge.copy_bytes > 0 for edge in edges if edge.producer == j])
    return {j: table for j, table in found.items() if table.any()}


def _of_ends(model: StepModel, i: int, readers: Counter[tuple[int, int]]) -> Iterator[Extra]:
    """What is held while results and gradients are brought to their layout, and afterwards."""
    outputs, own = model.nodes[i].output_bytes, np.zeros(model.nodes[i].size, np.int64)
    pairs: Pairs = {}
    for result in (result for result in model.results if result.producer == i):
        yield Extra(i, Phase.AFTER, own + result.peak_bytes, pairs)
        replaced = outputs[:, result.output] if readers[i, result.output] == 1 else 0
        own = own + np.where(result.copy_bytes > 0, result.copy_bytes - replaced, 0)
    for gradient in (gradient for gradient in model.gradients if gradient.producer == i):
        yield Extra(i, Phase.AFTER, own, _with(pairs, gradient.parameter, gradient.peak_bytes.T))
        replaced = outputs[:, gradient.output, None] if readers[i, gradient.output] == 1 else 0
        kept = np.where(gradient.copy_bytes > 0, gradient.copy_bytes - replaced, 0)
        pairs = _with(pairs, gradient.parameter, kept.T)
    yield Extra(i, Phase.KEPT, own, pairs)


def _with(pairs: Pairs, producer: int, more: IntArray) -> Pairs:
    """Pairs and more bytes of one producer."""
    return {**pairs, producer: pairs[producer] + more if producer in pairs else more}
