"""What runs when on which stream of a step."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from planner.view.opened import OpenedPlan
from planner.view.streams import GROUPS
from planner.view.styles import GROUP_STYLE
from planner.view.timeline import bars_by_group, streams_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MILLISECOND = 1e6
"""In nanoseconds."""
MOST_BARS = 500
"""Bars that a printed line can still tell apart."""


def streams_over_time(opened: OpenedPlan, start_ms: float = 0.0, end_ms: float = inf) -> Figure:
    """Timeline of a step: the computation, the links of each mesh axis, and copies to and from the host.

    Parameters
    ----------
    opened
        A plan, opened in its session.
    start_ms, end_ms
        Part of the step to show, in milliseconds since its start.

    Returns
    -------
    Figure
        Streams over milliseconds; one colour and hatch for each group of instructions.

    Raises
    ------
    ValueError
        The part is empty or begins after the end of the step.
    """
    from matplotlib import pyplot

    end_ms = min(end_ms, opened.time.total / MILLISECOND)
    if not 0 <= start_ms < end_ms:
        raise ValueError(
            f"start_ms is {start_ms:g} and end_ms {end_ms:g}: give a part of the step, which ends after "
            f"{opened.time.total / MILLISECOND:g} ms"
        )
    streams = streams_of([opened])
    whole = opened.time.total / MILLISECOND
    bars = bars_by_group(opened, round(MOST_BARS * whole / (end_ms - start_ms)))
    figure, axes = pyplot.subplots(figsize=(9.0, 1.9 + 0.45 * len(streams)), layout="constrained")
    for group in GROUPS:
        colour, hatch = GROUP_STYLE[group]
        named = group
        for number, stream in enumerate(streams):
            spans = [
                (bar[0].start / MILLISECOND, (bar[-1].end - bar[0].start) / MILLISECOND)
                for bar in bars.get(group, ())
                if bar[0].stream == stream
                and bar[0].start < end_ms * MILLISECOND
                and bar[-1].end > start_ms * MILLISECOND
            ]
            if spans:
                axes.broken_barh(
                    spans,
                    (number - 0.4, 0.8),
                    facecolor=colour,
                    hatch=3 * hatch,
                    edgecolor="black",
                    linewidth=0.2,
                    label=named,
                )
                named = "_"  # one entry of the legend for all streams
    axes.set(xlim=(start_ms, end_ms), yticks=range(len(streams)), yticklabels=streams)
    axes.set(xlabel="time since the start of the step (ms)", ylabel="stream")
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize="small")
    pyplot.close(figure)
    return figure
