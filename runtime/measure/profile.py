"""Where a step's time goes: each instruction's measured time beside its predicted one.

The time of an instruction that communicates is that of the rank that waited least for it. What the others took longer
is waiting, which appears as a row of its own, so that the rows of measured times add up to the step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.problem.files import write_text_atomically
from planner.graph.operator_graph import OperatorGraph
from planner.replay.streams import StepTime
from planner.schedule.instructions import Free, Instruction, Schedule, Update
from planner.view.naming import COLLECTIVES, kind_of, module_of
from planner.view.trace import chrome_trace, named_process, predicted_events, slice_of

WAITING = "waiting for other ranks"


@dataclass(frozen=True, slots=True)
class Line:
    """A group of instructions with its measured and predicted nanoseconds of a step."""

    name: str
    count: int
    predicted_ns: int
    measured_ns: int


@dataclass(frozen=True, eq=False)
class StepProfile:
    """Measured and predicted times of a schedule's instructions.

    Parameters
    ----------
    graph, schedule
        The step, and the schedule that ran.
    measured
        (ranks, instructions) nanoseconds, waiting included.
    time
        Predicted times; None where nothing was predicted.
    """

    graph: OperatorGraph
    schedule: Schedule
    measured: NDArray[np.int64]
    time: StepTime | None

    @property
    def predicted(self) -> NDArray[np.int64]:
        """(instructions,) nanoseconds on the computation's stream; zeros where nothing was predicted."""
        count = len(self.schedule.instructions)
        return np.array([0] * count if self.time is None else self.time.durations, dtype=np.int64)

    @property
    def own(self) -> NDArray[np.int64]:
        """(instructions,) nanoseconds without waiting: for what communicates of the fastest rank, else the mean."""
        mean = np.rint(self.measured.mean(axis=0)).astype(np.int64)
        return np.asarray(np.where(self._communicates, self.measured.min(axis=0), mean), dtype=np.int64)

    @property
    def waiting_ns(self) -> int:
        """Nanoseconds of a step in which a rank waits for others, as a mean of ranks."""
        waited = self.measured.mean(axis=0) - self.measured.min(axis=0)
        return int(waited[self._communicates].sum())

    @property
    def _communicates(self) -> NDArray[np.bool_]:
        return np.array([kind_of(self.graph, entry) in COLLECTIVES for entry in self.schedule.instructions])

    def by_kind(self) -> list[Line]:
        """Lines by class of operator, collective or copy, the longest first."""
        lines = self._lines(lambda entry: kind_of(self.graph, entry))
        return [*lines, Line(WAITING, 0, 0, self.waiting_ns)] if len(self.measured) > 1 else lines

    def by_module(self, depth: int = 2) -> list[Line]:
        """Lines by module, of names cut to ``depth`` parts, the longest first; layers of a list count together."""
        return self._lines(lambda entry: _module(self.graph, self.schedule, entry, depth))

    def _lines(self, name: Callable[[Instruction], str]) -> list[Line]:
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for entry, predicted, measured in zip(self.schedule.instructions, self.predicted, self.own, strict=True):
            row = sums[name(entry)]
            row[0] += 1
            row[1] += int(predicted)
            row[2] += int(measured)
        lines = [Line(key, *row) for key, row in sums.items()]
        return sorted(lines, key=lambda line: -line.measured_ns)

    def trace(self) -> dict[str, Any]:
        """Chrome trace: the prediction, with a row for each stream, and every rank as processes one below the other."""
        events: list[dict[str, Any]] = []
        if self.time is not None:
            events += predicted_events(self.graph, self.schedule, self.time)
        for rank, durations in enumerate(self.measured):
            events += named_process(rank + 1, f"rank {rank}, measured", {0: "instructions"})
            begins = np.cumsum(durations) - durations
            for at, (begin, duration) in enumerate(zip(begins.tolist(), durations.tolist(), strict=True)):
                if duration:
                    made = slice_of(self.graph, self.schedule, at, begin, duration)
                    events.append({**made, "pid": rank + 1, "tid": 0})
        return chrome_trace(events)

    def save_trace(self, path: Path) -> None:
        """Write :meth:`trace` as JSON, for Perfetto or ``chrome://tracing``."""
        write_text_atomically(path, json.dumps(self.trace()) + "\n")


def profile_of(
    graph: OperatorGraph,
    schedule: Schedule,
    measured: Sequence[Sequence[int]],
    time: StepTime | None,
) -> StepProfile:
    """Profile of a run.

    Parameters
    ----------
    graph, schedule
        The step and the schedule that ran.
    measured
        Nanoseconds per rank and instruction.
    time
        Predicted times; None where nothing predicts them.
    """
    return StepProfile(graph, schedule, np.array(measured, dtype=np.int64), time)


def _module(graph: OperatorGraph, schedule: Schedule, entry: Instruction, depth: int) -> str:
    """Name of the module that an instruction belongs to, numbers of layers as a star."""
    if isinstance(entry, Update | Free):
        return kind_of(graph, entry)
    parts = ["*" if part.isdigit() else part for part in module_of(graph, schedule, entry).split(".") if part]
    return ".".join(parts[:depth]) or "(outside modules)"
