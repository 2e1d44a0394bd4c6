"""The predicted schedule as a Chrome trace, which Perfetto and ``chrome://tracing`` open, beside a measured one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.graph.operator_graph import OperatorGraph
from planner.replay.streams import StepTime
from planner.schedule.instructions import Schedule
from planner.view.naming import kind_of, label_of, module_of
from planner.view.streams import COMPUTATION, intervals_of

Event = Mapping[str, Any]
MICROSECOND = 1e3
"""In nanoseconds; traces count microseconds."""
STEP = "ProfilerStep#"
"""Begin of the name of the event with which ``torch.profiler`` marks a step."""


class TraceError(ValueError):
    """A file that is no Chrome trace; the message names it and the remedy."""


def predicted_events(
    graph: OperatorGraph, schedule: Schedule, time: StepTime, process: int = 0, begin_us: float = 0.0
) -> list[dict[str, Any]]:
    """Events of one process with a row for each stream.

    Parameters
    ----------
    graph, schedule, time
        The step, its schedule and the predicted times.
    process
        Number of the process in the trace.
    begin_us
        Microseconds at which the step begins in the trace.
    """
    intervals = intervals_of(graph, schedule, time)
    streams = sorted({entry.stream for entry in intervals}, key=lambda name: (name != COMPUTATION, name))
    rows = {stream: row for row, stream in enumerate(streams)}
    events = named_process(process, "predicted", {row: stream for stream, row in rows.items()})
    for entry in intervals:
        instruction = schedule.instructions[entry.instruction]
        made = slice_of(graph, schedule, entry.instruction, entry.start, entry.end - entry.start)
        made["args"] |= {"group": entry.group, "module": module_of(graph, schedule, instruction)}
        events.append({**made, "pid": process, "tid": rows[entry.stream], "ts": made["ts"] + begin_us})
    return events


def slice_of(graph: OperatorGraph, schedule: Schedule, at: int, start_ns: int, length_ns: int) -> dict[str, Any]:
    """Event of an instruction, without process and row."""
    entry = schedule.instructions[at]
    return {
        "ph": "X",
        "name": label_of(graph, schedule, entry),
        "cat": kind_of(graph, entry),
        "ts": start_ns / MICROSECOND,
        "dur": length_ns / MICROSECOND,
        "args": {"instruction": at},
    }


def named_process(process: int, name: str, rows: Mapping[int, str]) -> list[dict[str, Any]]:
    """Events that give a process and its rows their names; processes are shown in the order of their numbers."""
    events = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}},
    ]
    for row, title in rows.items():
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": title}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": process, "tid": row, "args": {"sort_index": row}})
    return events


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """A trace with these events."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms"}


def trace_beside(
    graph: OperatorGraph, schedule: Schedule, time: StepTime, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """A measured trace with the prediction as a further process, which begins with its first step.

    Parameters
    ----------
    graph, schedule, time
        As for :func:`predicted_events`.
    measured
        A trace as :func:`read_trace` reads it; all of it is kept.
    """
    events: Sequence[Event] = measured["traceEvents"]
    slices = [event for event in events if event.get("ph") == "X" and isinstance(event.get("ts"), int | float)]
    steps = [event["ts"] for event in slices if str(event.get("name", "")).startswith(STEP)]
    begin = min(steps or (event["ts"] for event in slices), default=0.0)
    numbers = [event["pid"] for event in events if isinstance(event.get("pid"), int)]
    process = max(numbers, default=-1) + 1
    return {**measured, "traceEvents": [*events, *predicted_events(graph, schedule, time, process, begin)]}


def read_trace(path: Path) -> dict[str, Any]:
    """Read a Chrome trace, such as ``torch.profiler.profile.export_chrome_trace`` writes.

    Raises
    ------
    TraceError
        The file cannot be read or holds no list of events.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"trace {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"trace {path} is not JSON: {error}; unpack it where it ends in .gz") from error
    if isinstance(document, list):
        document = {"traceEvents": document}
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError(f"trace {path} has no list traceEvents of objects: give a Chrome trace")
    return dict(document)
