"""Tables of one training step, the input of all operator-level models.

A :class:`StepModel` holds no tensors and no placements, only tables: per node and layout a cost and
bytes, per edge and pair of layouts the cost and bytes of resharding. View operators are folded into
the edges, so every node that computes owns the storages of its outputs. The order of events is in
:mod:`formulations.step.timeline`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from formulations.problem.strategy_problem import BoolArray, IntArray

if TYPE_CHECKING:
    from formulations.step.weights import StepWeights

Moments = tuple[int, ...]
"""Backward operators before which an operator runs again, in ascending order."""


class NodeKind(StrEnum):
    """Kind of a node of a step."""

    INPUT = "input"
    PARAMETER = "parameter"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, eq=False)
class StepNode:
    """An input, a parameter or an operator that computes, with its layouts.

    Parameters
    ----------
    name
        Stable name for messages.
    kind
        Inputs and parameters are resident; operators run once, in the order of the nodes.
    cost
        Cost of one execution per layout, shape ``(S,)``, in quanta.
    output_bytes
        Bytes of each output's storage on one device, shape ``(S, outputs)``.
    resident_bytes
        Bytes held during the whole step, shape ``(S,)``: an input, or a parameter with its
        optimizer state.
    update_cost, update_bytes
        Cost and extra bytes of the optimizer's update of this parameter, shape ``(S,)``, or None where
        nothing is updated.
    recomputable
        Whether a forward operator may be run again.
    transfer_cost
        Time of a copy of each output to host memory or back, shape ``(S, outputs)``, in quanta; None where they
        stay on the device.
    workspace_bytes
        Bytes that one execution holds beyond arguments and outputs, shape ``(S,)``; None where it holds none.
    """

    name: str
    kind: NodeKind
    cost: IntArray
    output_bytes: IntArray
    resident_bytes: IntArray
    update_cost: IntArray | None = None
    update_bytes: IntArray | None = None
    recomputable: bool = False
    transfer_cost: IntArray | None = None
    workspace_bytes: IntArray | None = None

    @property
    def size(self) -> int:
        """Number of layouts."""
        return int(self.cost.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class StepEdge:
    """One tensor argument: an output of ``producer`` read by ``consumer`` as its argument ``slot``.

    Tables have shape ``(S_producer, S_consumer)``. ``copy_bytes`` is the resharded copy that lives while
    the consumer computes (0 where the producer's storage is read directly); ``peak_bytes`` the most that
    is alive beyond the producer's storage while the copy is made (a storage that nothing else reads may end on the
    way, so that this may be less than the copy). ``link_cost``, shape ``(axes, S_producer,
    S_consumer)``, is the part of the cost for which the link of each mesh axis is busy; None where nobody asks.
    """

    producer: int
    output: int
    consumer: int
    slot: int
    cost: IntArray
    copy_bytes: IntArray
    peak_bytes: IntArray
    forbidden: BoolArray
    link_cost: IntArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GradientEdge:
    """A gradient brought to the layout of its parameter as soon as it is produced.

    As :class:`StepEdge` with the parameter as consumer; ``copy_bytes`` is 0 where the producer's
    storage itself becomes the gradient.
    """

    producer: int
    output: int
    parameter: int
    cost: IntArray
    copy_bytes: IntArray
    peak_bytes: IntArray
    forbidden: BoolArray
    link_cost: IntArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ResultEdge:
    """A result (loss, updated buffer) brought to its fixed layout; tables of shape ``(S_producer,)``."""

    producer: int
    output: int
    cost: IntArray
    copy_bytes: IntArray
    peak_bytes: IntArray
    forbidden: BoolArray


@dataclass(frozen=True, eq=False)
class StepModel:
    """One training step as tables; see the module docstring.

    Nodes are ordered: inputs and parameters, forward operators, backward operators. ``weights`` makes every cost count
    by when it is paid (:mod:`formulations.step.weights`); None counts all alike.
    """

    nodes: tuple[StepNode, ...]
    edges: tuple[StepEdge, ...]
    gradients: tuple[GradientEdge, ...]
    results: tuple[ResultEdge, ...]
    seconds_per_cost: float = 1e-9
    weights: StepWeights | None = None

    @cached_property
    def edges_from(self) -> tuple[tuple[StepEdge, ...], ...]:
        """Edges by producer."""
        found: list[list[StepEdge]] = [[] for _ in self.nodes]
        for edge in self.edges:
            found[edge.producer].append(edge)
        return tuple(tuple(edges) for edges in found)

    @cached_property
    def first_backward_use(self) -> tuple[int, ...]:
        """First backward operator that reads any output of a forward operator (KIWI's H), else -1."""
        first = [-1] * len(self.nodes)
        for edge in self.edges:
            if self.nodes[edge.producer].kind is NodeKind.FORWARD:
                consumer = edge.consumer
                if self.nodes[consumer].kind is NodeKind.BACKWARD and (
                    first[edge.producer] < 0 or consumer < first[edge.producer]
                ):
                    first[edge.producer] = consumer
        return tuple(first)

    @cached_property
    def rerunnable(self) -> BoolArray:
        """Forward operators that may run again; an operator that makes a result or a gradient may not."""
        with_result = {edge.producer for edge in self.results} | {edge.producer for edge in self.gradients}
        return np.array([node.recomputable and i not in with_result for i, node in enumerate(self.nodes)], np.bool_)


@dataclass(frozen=True, slots=True)
class StepDecision:
    """A solution of a step model.

    Parameters
    ----------
    layouts
        Layout of every node.
    recomputed
        Forward operators that run again, each with the backward operators before which it does. A rerun
        happens right before its backward operator, after the reruns of smaller index that belong to it. Every
        reader of a value takes the newest copy, and a copy is held until its last reader.
    offloaded
        Forward operators whose outputs are in host memory until backward.
    """

    layouts: tuple[int, ...]
    recomputed: Mapping[int, Moments]
    offloaded: frozenset[int] = frozenset()
