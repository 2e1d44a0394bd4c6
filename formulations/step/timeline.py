"""Timeline of a training step: its events in order, and their times.

Time runs over *events*: a forward operator, a further execution of one, a backward operator, the reduction
of a gradient, the delivery of a result, the optimizer's update of a parameter. The event of an operator has one
time per argument, while that argument is brought to its layout, and a last one, while the operator
computes. All other events have one time.

A model may leave open whether and when an operator runs again: the timeline then has an event for every
*slot*, a backward operator before which the rerun may happen. The reruns of one backward operator form its
*burst*, in the order of the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from formulations.step.training_step import NodeKind, StepModel


class EventKind(StrEnum):
    """Kind of an event."""

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

    Parameters
    ----------
    events
        All possible events.
    start
        First time of each event, with the horizon as one more entry at the end.
    compute, update
        Event of every node.
    recompute
        Per node its rerun events by slot.
    burst
        Time at which a backward operator's reruns start, its own start where it has none.
    gradient, result
        Event of every gradient and result.
    """

    events: tuple[Event, ...]
    start: tuple[int, ...]
    compute: tuple[int, ...]
    recompute: tuple[Mapping[int, int], ...]
    burst: tuple[int, ...]
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


def build_timeline(model: StepModel, slots: Mapping[int, Sequence[int]]) -> Timeline:
    """Timeline of all possible events.

    Parameters
    ----------
    model
        The step.
    slots
        Per forward operator that may run again, the backward operators before which it may.
    """
    count = len(model.nodes)
    compute, update, burst = [-1] * count, [-1] * count, [-1] * count
    recompute: list[dict[int, int]] = [{} for _ in range(count)]
    gradient, result = [-1] * len(model.gradients), [-1] * len(model.results)
    reruns: dict[int, list[int]] = {}
    for node in sorted(slots):
        for slot in slots[node]:
            reruns.setdefault(slot, []).append(node)
    gradients_of: dict[int, list[int]] = {}
    for k, gradient_edge in enumerate(model.gradients):
        gradients_of.setdefault(gradient_edge.producer, []).append(k)
    results_of: dict[int, list[int]] = {}
    for k, result_edge in enumerate(model.results):
        results_of.setdefault(result_edge.producer, []).append(k)
    arguments = [0] * count
    for edge in model.edges:
        arguments[edge.consumer] = max(arguments[edge.consumer], edge.slot + 1)

    events: list[Event] = []
    start: list[int] = [0]

    def add(kind: EventKind, index: int, times: int = 1) -> int:
        events.append(Event(kind, index))
        start.append(start[-1] + times)
        return len(events) - 1

    for i, step_node in enumerate(model.nodes):
        if step_node.kind in (NodeKind.FORWARD, NodeKind.BACKWARD):
            burst[i] = start[-1]
            for j in reruns.get(i, ()):
                recompute[j][i] = add(EventKind.RECOMPUTE, j, arguments[j] + 1)
            compute[i] = add(EventKind.COMPUTE, i, arguments[i] + 1)
        for k in results_of.get(i, ()):
            result[k] = add(EventKind.RESULT, k)
        for k in gradients_of.get(i, ()):
            gradient[k] = add(EventKind.GRADIENT, k)
    for i, step_node in enumerate(model.nodes):
        if step_node.update_bytes is not None:
            update[i] = add(EventKind.UPDATE, i)
    return Timeline(
        tuple(events),
        tuple(start),
        tuple(compute),
        tuple(recompute),
        tuple(burst),
        tuple(gradient),
        tuple(result),
        tuple(update),
    )
