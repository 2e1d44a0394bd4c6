"""What all timetables of a decision share: its schedule without overlap, and a clock that leaves transfers out."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import OperatorGraph
from planner.overlap.buckets import Bucket, BucketRule, Grouping
from planner.overlap.transfers import transfers
from planner.replay.clocks import StepCosts, instruction_quanta, step_time
from planner.replay.memory import LocalBytes
from planner.replay.structure import communicating_axes
from planner.schedule.instructions import Free, Reshard, Schedule


class SerialSchedule:
    """A correct schedule without overlapped collectives and without offload, and its transfers.

    Parameters
    ----------
    graph
        The step.
    schedule
        The schedule.
    costs
        Prices of instructions.
    """

    def __init__(self, graph: OperatorGraph, schedule: Schedule, costs: StepCosts) -> None:
        self.graph, self.schedule, self.costs = graph, schedule, costs
        self.local_bytes = LocalBytes(graph, schedule.mesh)
        every = transfers(graph, schedule)
        moved = {at for transfer in every for at in transfer.positions}
        instructions = schedule.instructions
        self.kept = [at for at, entry in enumerate(instructions) if at not in moved and not isinstance(entry, Free)]
        """Positions of what is neither part of a transfer nor a free."""
        self.quanta = [instruction_quanta(graph, schedule, costs, instructions[at]) for at in self.kept]
        self.begins = np.concatenate(([0], np.cumsum(np.array(self.quanta, dtype=np.int64))))
        """When each of these begins, and the end of the last."""
        self.grouping = Grouping(graph, schedule, costs, every, self._begin)
        self._buckets: dict[BucketRule, list[Bucket]] = {}

    def _begin(self, at: int) -> int:
        """When the instruction at or behind a position begins."""
        return int(self.begins[bisect_left(self.kept, at)])

    def buckets(self, rule: BucketRule) -> list[Bucket]:
        """Transfers by the collectives that they share under a rule."""
        if rule not in self._buckets:
            self._buckets[rule] = self.grouping.of(rule, int(self.begins[-1]))
        return self._buckets[rule]

    @cached_property
    def blocking(self) -> tuple[NDArray[np.int64], ...]:
        """Per axis: quanta for which resharded activations need its link before each kept instruction, and in all."""
        return tuple(map(self._blocked, range(len(self.schedule.mesh))))

    def _blocked(self, axis: int) -> NDArray[np.int64]:
        entries = (self.schedule.instructions[at] for at in self.kept)
        costs = [
            cost if isinstance(entry, Reshard) and axis in communicating_axes(entry.path) else 0
            for entry, cost in zip(entries, self.quanta, strict=True)
        ]
        return np.concatenate(([0], np.cumsum(np.array(costs, dtype=np.int64))))

    def time_of(self, timetable: Schedule) -> int:
        """Quanta that a timetable takes, as the replay computes them."""
        time, unpriced = step_time(self.graph, timetable, self.costs, self.local_bytes)
        assert time is not None, unpriced
        return time.total
