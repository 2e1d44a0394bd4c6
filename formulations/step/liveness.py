"""Lifetimes of the outputs of a step's operators: their last uses.

A value is held until its last reader has it: up to the argument's time where the reader gets a resharded
copy, up to the reader's computation where it reads the storage itself. Which of the two happens depends on
both layouts, so the difference is usage of the pair (:attr:`LastUse.aliases`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from formulations.problem.strategy_problem import BoolArray
from formulations.step.equal_tables import EqualTables
from formulations.step.timeline import Timeline
from formulations.step.training_step import NodeKind, StepEdge, StepModel


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


def lifetimes(model: StepModel, timeline: Timeline, tables: EqualTables) -> dict[tuple[int, int], Lifetime]:
    """Find the last uses of every output that is read, by (node, output).

    Recomputed readers are left out: whether and how long they prolong a lifetime is a decision of its own.

    Parameters
    ----------
    model, timeline
        The step and its timeline.
    tables
        Keeps equal tables of layouts as one.
    """
    last: dict[tuple[tuple[int, int], bool], list[StepEdge]] = {}
    for edge in model.edges:
        phase = (edge.producer, edge.output), model.nodes[edge.consumer].kind is NodeKind.BACKWARD
        known = last.get(phase)
        if known is None or known[0].consumer < edge.consumer:  # operators run in the order of the nodes
            last[phase] = [edge]
        elif known[0].consumer == edge.consumer:
            known.append(edge)
    ends: dict[tuple[int, int], list[tuple[bool, LastUse]]] = {}
    for (key, backward), edges in last.items():
        ends.setdefault(key, []).append((backward, _operator_use(timeline, edges, tables)))
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


def read_directly(edges: Sequence[StepEdge], tables: EqualTables) -> BoolArray:
    """Layouts under which an operator reads the storage of one output through any of these arguments, without a copy.

    Returns
    -------
    BoolArray
        Shape ``(S_producer, S_reader)``.
    """
    copies = tuple(edge.copy_bytes for edge in edges)
    return tables.made_of(copies, ("read directly",), lambda: np.logical_or.reduce([copy == 0 for copy in copies]))


def _operator_use(timeline: Timeline, edges: list[StepEdge], tables: EqualTables) -> LastUse:
    reader = edges[0].consumer
    event = timeline.compute[reader]
    end = timeline.argument_time(event, max(edge.slot for edge in edges)) + 1
    return LastUse(end, timeline.last_time(event) + 1, reader, read_directly(edges, tables))
