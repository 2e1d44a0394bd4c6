"""Where a step's time goes: each instruction's measured time beside its predicted one.

The time of an instruction that communicates is that of the rank that waited least for it. What the others took longer
is waiting, which appears as a row of its own, so that the rows of measured times add up to the step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.problem.files import write_text_atomically
from planner.graph.operator_classes import operator_class
from planner.graph.operator_graph import OperatorGraph
from planner.machine.resharding import step_between
from planner.schedule.instructions import Compute, Free, Instruction, Offload, Prefetch, Reshard, Schedule, Update, Wait

WAITING = "waiting for other ranks"
COPY_OUT, COPY_IN, FREE, VIEW, UPDATE = "copy to the host", "copy from the host", "release", "view", "optimizer"
START, WAIT = "start of a collective", "wait for a collective"
LOCAL_RESHARD = "local slice"


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
    predicted
        (instructions,) nanoseconds; zeros where nothing was predicted.
    """

    graph: OperatorGraph
    schedule: Schedule
    measured: NDArray[np.int64]
    predicted: NDArray[np.int64]

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
        return np.array([_kind(self.graph, entry) in _COLLECTIVES for entry in self.schedule.instructions])

    def by_kind(self) -> list[Line]:
        """Lines by class of operator, collective or copy, the longest first."""
        lines = self._lines(lambda entry: _kind(self.graph, entry))
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
        """Chrome trace: predicted and measured instructions one below the other, and every rank."""
        rows = [("predicted", self.predicted), *((f"rank {rank}", row) for rank, row in enumerate(self.measured))]
        events: list[dict[str, Any]] = []
        for thread, (label, durations) in enumerate(rows):
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": {"name": label}})
            starts = np.concatenate([[0], np.cumsum(durations)[:-1]]) if len(durations) else durations
            for at, (entry, start, duration) in enumerate(
                zip(self.schedule.instructions, starts.tolist(), durations.tolist(), strict=True)
            ):
                if duration:
                    events.append(
                        {
                            "ph": "X",
                            "name": _label(self.graph, self.schedule, entry),
                            "cat": _kind(self.graph, entry),
                            "pid": 0,
                            "tid": thread,
                            "ts": start / 1e3,
                            "dur": duration / 1e3,
                            "args": {"instruction": at},
                        }
                    )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: Path) -> None:
        """Write :meth:`trace` as JSON, for Perfetto or ``chrome://tracing``."""
        write_text_atomically(path, json.dumps(self.trace()) + "\n")


def profile_of(
    graph: OperatorGraph,
    schedule: Schedule,
    measured: Sequence[Sequence[int]],
    predicted: Sequence[int] | None,
) -> StepProfile:
    """Profile of a run.

    Parameters
    ----------
    graph, schedule
        The step and the schedule that ran.
    measured
        Nanoseconds per rank and instruction.
    predicted
        Nanoseconds of each instruction on the compute stream; None where nothing predicts them.
    """
    if predicted is None:
        predicted = [0] * len(schedule.instructions)
    return StepProfile(graph, schedule, np.array(measured, dtype=np.int64), np.array(predicted, dtype=np.int64))


_COLLECTIVES = frozenset({"all_gather", "all_reduce", "reduce_scatter", "all_to_all"})


def _kind(graph: OperatorGraph, entry: Instruction) -> str:
    match entry:
        case Compute(operator):
            described = graph.operators[operator]
            return VIEW if described.is_view else str(operator_class(described.target))
        case Reshard(overlapped=True):
            return START
        case Wait():
            return WAIT
        case Reshard(_, _, path):
            steps = (step_between(before, after) for before, after in pairwise(path))
            found = [str(step.collective) for step in steps if step is not None and step.collective is not None]
            return found[0] if found else LOCAL_RESHARD
        case Update():
            return UPDATE
        case Offload():
            return COPY_OUT
        case Prefetch():
            return COPY_IN
        case Free():
            return FREE


def _label(graph: OperatorGraph, schedule: Schedule, entry: Instruction) -> str:
    match entry:
        case Compute(operator, recompute=recompute):
            return graph.operators[operator].identity + " (again)" * recompute
        case Wait(buffer):
            return f"{WAIT}: {graph.values[schedule.buffers[buffer].value].name}"
        case Reshard(source, _, path):
            return f"{graph.values[schedule.buffers[source].value].name}: {' -> '.join(','.join(at) for at in path)}"
        case Update(parameter):
            return f"update {graph.values[schedule.buffers[parameter].value].name}"
        case Offload(source) | Prefetch(source):
            return f"{_kind(graph, entry)}: {graph.values[schedule.buffers[source].value].name}"
        case Free():
            return FREE


def _module(graph: OperatorGraph, schedule: Schedule, entry: Instruction, depth: int) -> str:
    """Name of the module that an instruction belongs to, numbers of layers as a star."""
    match entry:
        case Compute(operator):
            name = graph.operators[operator].identity.partition("/")[0]
        case Reshard(source) | Offload(source) | Prefetch(source):
            name = graph.values[schedule.buffers[source].value].name.partition("/")[0]
        case Wait(buffer):
            name = graph.values[schedule.buffers[buffer].value].name.partition("/")[0]
        case Update():
            return UPDATE
        case Free():
            return FREE
    parts = ["*" if part.isdigit() else part for part in name.split(".") if part]
    return ".".join(parts[:depth]) or "(outside modules)"
