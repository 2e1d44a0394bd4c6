"""When the outputs of a step's operators are read for the last time.

A value is held until its last reader has it: up to the argument's time where the reader gets a resharded
copy, up to the reader's computation where it reads the storage itself. Which of the two happens depends on
both layouts, so the difference is usage of the pair (:attr:`LastUse.aliases`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from formulations.models.step import NodeKind, StepEdge, StepModel
from formulations.models.timeline import Timeline
from formulations.problem import BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class LastUse:
    """The last event that reads an output.

    Parameters
    ----------
    end
        End of the output's life where the reader takes a copy.
    computed_end
        End where the reader reads the storage itself; equal to ``end`` for results and gradients.
    reader
        The operator that reads, or -1 for a result or a gradient.
    aliases
        Shape ``(S_producer, S_reader)``: layouts under which the reader reads the storage itself.
    """

    end: int
    computed_end: int
    reader: int = -1
    aliases: BoolArray | None = None


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Last forward and last backward use of one output; None where there is none.

    Results count as forward uses, gradients as backward uses.
    """

    forward: LastUse | None
    backward: LastUse | None

    @property
    def last(self) -> LastUse | None:
        """The last use of all."""
        return self.backward or self.forward


def lifetimes(model: StepModel, timeline: Timeline) -> dict[tuple[int, int], Lifetime]:
    """Find the last uses of every output that is read, by (node, output).

    Recomputed readers are left out: whether and how long they prolong a life is a decision of its own.
    """
    readers: dict[tuple[int, int], dict[int, list[StepEdge]]] = {}
    for edge in model.edges:
        readers.setdefault((edge.producer, edge.output), {}).setdefault(edge.consumer, []).append(edge)
    ends: dict[tuple[int, int], list[tuple[bool, LastUse]]] = {}
    for key, by_reader in readers.items():
        for reader, edges in by_reader.items():
            backward = model.nodes[reader].kind is NodeKind.BACKWARD
            ends.setdefault(key, []).append((backward, _operator_use(timeline, reader, edges)))
    for k, result in enumerate(model.results):
        time = timeline.last_time(timeline.result[k])
        ends.setdefault((result.producer, result.output), []).append((False, LastUse(time + 1, time + 1)))
    for k, gradient in enumerate(model.gradients):
        time = timeline.last_time(timeline.gradient[k])
        ends.setdefault((gradient.producer, gradient.output), []).append((True, LastUse(time + 1, time + 1)))
    return {
        key: Lifetime(
            max((use for backward, use in uses if not backward), key=lambda use: use.computed_end, default=None),
            max((use for backward, use in uses if backward), key=lambda use: use.computed_end, default=None),
        )
        for key, uses in ends.items()
    }


def _operator_use(timeline: Timeline, reader: int, edges: list[StepEdge]) -> LastUse:
    event = timeline.compute[reader]
    end = timeline.argument_time(event, max(edge.slot for edge in edges)) + 1
    aliases = np.logical_or.reduce([edge.copy_bytes == 0 for edge in edges])
    return LastUse(end, timeline.last_time(event) + 1, reader, aliases)
