"""Bars of a timeline: what runs when on every stream, as charts and figures draw it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from planner.view.opened import OpenedPlan
from planner.view.streams import COMPUTATION, GROUPS, Interval

MOST_BARS = 2000
"""Bars of an interactive timeline."""


def streams_of(shown: Sequence[OpenedPlan]) -> list[str]:
    """Streams of several plans, the computation first."""
    used = {interval.stream for plan in shown for interval in plan.intervals}
    return sorted(used, key=lambda stream: (stream != COMPUTATION, "host" in stream, stream))


def bars_by_group(opened: OpenedPlan, most: int = MOST_BARS) -> dict[str, list[list[Interval]]]:
    """Bars by group; neighbours of one module and group without a pause between them are one bar.

    Parameters
    ----------
    opened
        The plan.
    most
        Bars of all streams up to which no more are joined; shorter neighbours of one group are joined first.
    """
    by_stream: dict[str, list[Interval]] = defaultdict(list)
    for interval in opened.intervals:
        by_stream[interval.stream].append(interval)
    for coarse in (0, *(opened.plan.decision.predicted.objective_ns // parts for parts in (4000, 1000, 250))):
        bars = [bar for intervals in by_stream.values() for bar in _joined(opened, intervals, coarse)]
        if len(bars) <= most:
            break
    found: dict[str, list[list[Interval]]] = {group: [] for group in GROUPS}
    for bar in bars:
        found[bar[0].group].append(bar)
    return {group: entries for group, entries in found.items() if entries}


def _joined(opened: OpenedPlan, intervals: Sequence[Interval], coarse: int) -> list[list[Interval]]:
    """Runs of intervals of one group: of one module, or where both are shorter than `coarse`, of any."""
    bars: list[list[Interval]] = []
    for interval in intervals:
        last = bars[-1] if bars else None
        if (
            last is not None
            and last[-1].group == interval.group
            and last[-1].end == interval.start
            and (
                opened.module(last[-1].instruction) == opened.module(interval.instruction)
                or max(last[-1].end - last[0].start, interval.end - interval.start) < coarse
            )
        ):
            last.append(interval)
        else:
            bars.append([interval])
    return bars
