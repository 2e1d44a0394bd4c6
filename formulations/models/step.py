"""The numbers of one training step: what the operator-level models share.

A :class:`StepModel` holds no tensors and no placements, only tables: per node and layout a cost and
bytes, per edge and pair of layouts the cost and bytes of resharding. View operators are folded into
the edges, so every node that computes owns the storages of its outputs.

Time runs over *events* (:class:`Timeline`): a forward operator, the possible re-execution of one right
before its first backward consumer, a backward operator, the reduction of a gradient, the optimizer's
update of a parameter. The event of an operator has one time per argument, while that argument is brought
to its layout, and a last one, while the operator computes. All other events have one time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from formulations.problem import BoolArray, IntArray


class NodeKind(StrEnum):
    """What a node of a step is."""

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
    """

    name: str
    kind: NodeKind
    cost: IntArray
    output_bytes: IntArray
    resident_bytes: IntArray
    update_cost: IntArray | None = None
    update_bytes: IntArray | None = None
    recomputable: bool = False

    @property
    def size(self) -> int:
        """Number of layouts."""
        return int(self.cost.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class StepEdge:
    """One tensor argument: an output of ``producer`` read by ``consumer`` as its argument ``slot``.

    Tables have shape ``(S_producer, S_consumer)``. ``copy_bytes`` is the resharded copy that lives while
    the consumer computes (0 where the producer's storage is read directly); ``peak_bytes`` the most that
    is alive beyond the producer's storage while the copy is made.
    """

    producer: int
    output: int
    consumer: int
    slot: int
    cost: IntArray
    copy_bytes: IntArray
    peak_bytes: IntArray
    forbidden: BoolArray


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


@dataclass(frozen=True, slots=True, eq=False)
class ResultEdge:
    """A result (loss, updated buffer) brought to its fixed layout; tables of shape ``(S_producer,)``."""

    producer: int
    output: int
    cost: IntArray
    copy_bytes: IntArray
    peak_bytes: IntArray
    forbidden: BoolArray


class EventKind(StrEnum):
    """What happens at an event."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    GRADIENT = "gradient"
    RESULT = "result"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the timeline.

    ``index`` is a node for ``COMPUTE``, ``RECOMPUTE`` and ``UPDATE``, a position in the model's
    gradients or results otherwise.
    """

    kind: EventKind
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Events in order of execution, and where each node's events are (-1 where it has none).

    ``start`` is the first time of each event, with the horizon as one more entry at the end.
    """

    events: tuple[Event, ...]
    start: tuple[int, ...]
    compute: tuple[int, ...]
    recompute: tuple[int, ...]
    gradient: tuple[int, ...]
    result: tuple[int, ...]
    update: tuple[int, ...]

    @property
    def horizon(self) -> int:
        """Number of times."""
        return self.start[-1]

    def argument_time(self, event: int, slot: int) -> int:
        """Time at which an operator's argument is brought to its layout."""
        return self.start[event] + slot

    def last_time(self, event: int) -> int:
        """Last time of an event: while the operator computes."""
        return self.start[event + 1] - 1


@dataclass(frozen=True, eq=False)
class StepModel:
    """One training step as tables; see the module docstring.

    Nodes are ordered: inputs and parameters, forward operators, backward operators.
    """

    nodes: tuple[StepNode, ...]
    edges: tuple[StepEdge, ...]
    gradients: tuple[GradientEdge, ...]
    results: tuple[ResultEdge, ...]
    seconds_per_cost: float = 1e-9

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
    def recompute_candidates(self) -> BoolArray:
        """Forward operators that may be recomputed: KIWI's z = 1 and nothing that forbids a rerun."""
        with_result = {edge.producer for edge in self.results} | {edge.producer for edge in self.gradients}
        return np.array(
            [
                node.recomputable and use >= 0 and i not in with_result
                for i, (node, use) in enumerate(zip(self.nodes, self.first_backward_use, strict=True))
            ],
            dtype=np.bool_,
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The order of everything that may happen."""
        return _timeline(self)


def _timeline(model: StepModel) -> Timeline:
    count = len(model.nodes)
    compute, recompute, update = [-1] * count, [-1] * count, [-1] * count
    gradient, result = [-1] * len(model.gradients), [-1] * len(model.results)
    reruns: list[list[int]] = [[] for _ in range(count)]
    for candidate in np.flatnonzero(model.recompute_candidates).tolist():
        reruns[model.first_backward_use[candidate]].append(candidate)
    gradients_of: dict[int, list[int]] = {}
    for k, gradient_edge in enumerate(model.gradients):
        gradients_of.setdefault(gradient_edge.producer, []).append(k)
    results_of: dict[int, list[int]] = {}
    for k, result_edge in enumerate(model.results):
        results_of.setdefault(result_edge.producer, []).append(k)

    slots = [0] * count
    for edge in model.edges:
        slots[edge.consumer] = max(slots[edge.consumer], edge.slot + 1)

    events: list[Event] = []
    start: list[int] = [0]

    def add(kind: EventKind, index: int, times: int = 1) -> int:
        events.append(Event(kind, index))
        start.append(start[-1] + times)
        return len(events) - 1

    for i, node in enumerate(model.nodes):
        if node.kind in (NodeKind.FORWARD, NodeKind.BACKWARD):
            for j in reruns[i]:
                recompute[j] = add(EventKind.RECOMPUTE, j, slots[j] + 1)
            compute[i] = add(EventKind.COMPUTE, i, slots[i] + 1)
        for k in results_of.get(i, ()):
            result[k] = add(EventKind.RESULT, k)
        for k in gradients_of.get(i, ()):
            gradient[k] = add(EventKind.GRADIENT, k)
    for i, node in enumerate(model.nodes):
        if node.update_bytes is not None:
            update[i] = add(EventKind.UPDATE, i)
    return Timeline(
        tuple(events), tuple(start), tuple(compute), tuple(recompute), tuple(gradient), tuple(result), tuple(update)
    )
