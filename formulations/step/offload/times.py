"""Least times of the events of a step, for the links to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from formulations.problem.strategy_problem import IntArray
from formulations.step.timeline import EventKind, Timeline
from formulations.step.training_step import StepModel

ROWS = 64
"""Rows of a link at most, its two ends aside."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Times of events without stalls and reruns; quanta, the end of the step as the last event.

    Parameters
    ----------
    begins
        Least time at which every event begins, shape ``(events + 1,)``.
    ready
        Least time at which its arguments have the layouts that its operator requires, shape ``(events + 1,)``.
    excess
        Most additional time of all events before by other layouts, arguments of reruns included.
    arguments
        Least time that bringing the arguments of every node takes, shape ``(nodes,)``.
    """

    begins: IntArray
    ready: IntArray
    excess: IntArray
    arguments: IntArray

    @property
    def step(self) -> int:
        """Least time of the step."""
        return int(self.begins[-1])

    def spread(self, first: int, last: int, rows: int = ROWS) -> IntArray:
        """Events from ``first`` to ``last`` at about equal distances of time, both among them."""
        times = np.linspace(self.begins[first], self.begins[last], rows)
        between = np.clip(np.searchsorted(self.begins, times), first, last)
        found: IntArray = np.unique([first, *between, last]).astype(np.int64)
        return found

    def until(self, event: int, events: IntArray, excess: int = 0) -> IntArray:
        """Most time from the begin of each of ``events`` to that of a later one, if layouts take ``excess`` at most."""
        more: IntArray = np.minimum(self.excess[event] - self.excess[events], excess)
        found: IntArray = self.begins[event] - self.begins[events] + more
        return found

    def since(self, event: int, events: IntArray, excess: int = 0) -> IntArray:
        """Most time from the begin of an event until each of ``events`` has its arguments, likewise."""
        behind = np.minimum(events + 1, len(self.excess) - 1)
        more: IntArray = np.minimum(self.excess[behind] - self.excess[event], excess)
        found: IntArray = self.ready[events] - self.begins[event] + more
        return found


def step_times(model: StepModel, timeline: Timeline) -> StepTimes:
    """Find the times of a step's events.

    Parameters
    ----------
    model, timeline
        The step and its timeline.
    """
    costs = _Costs()
    arguments = np.zeros((len(model.nodes), 2), dtype=np.int64)
    for edge in model.edges:
        arguments[edge.consumer] += costs.least_and_most(edge.cost)
    own = np.zeros((len(timeline.events), 2), dtype=np.int64)
    first = np.zeros(len(timeline.events), dtype=np.int64)
    for k, event in enumerate(timeline.events):
        match event.kind:
            case EventKind.COMPUTE:
                own[k] = arguments[event.index] + costs.least_and_most(model.nodes[event.index].cost)
                first[k] = arguments[event.index, 0]
            case EventKind.RECOMPUTE:
                own[k, 1] = arguments[event.index, 1] - arguments[event.index, 0]
            case EventKind.GRADIENT:
                own[k] = costs.least_and_most(model.gradients[event.index].cost)
            case EventKind.RESULT:
                own[k] = costs.least_and_most(model.results[event.index].cost)
            case EventKind.UPDATE:
                own[k] = costs.least_and_most(model.nodes[event.index].update_cost)
    begins, most = np.concatenate((np.zeros((1, 2), np.int64), np.cumsum(own, axis=0))).T
    return StepTimes(begins, begins + np.append(first, 0), most - begins, arguments[:, 0])


class _Costs:
    """Extremes of tables, cached by identity, since many tables are the same."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}

    def least_and_most(self, table: IntArray | None) -> tuple[int, int]:
        """Of a table, which stays alive meanwhile; zero where there is none."""
        if table is None:
            return 0, 0
        known = self._known.get(id(table))
        if known is None:
            known = self._known[id(table)] = int(table.min()), int(table.max())
        return known
