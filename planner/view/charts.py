"""Interactive charts of a plan by plotly: memory over time above its streams, and where the seconds go.

Every kind has a shade and a pattern of its own, so that charts are readable in black and white.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.common.units import axis_unit, format_bytes, format_seconds
from planner.replay.report import Category
from planner.view.opened import OpenedPlan
from planner.view.streams import AGAIN, COMPUTATION, FORWARD, GROUPS, Interval, group_of, kind_of_time
from planner.view.styles import CATEGORIES, GROUP_STYLE, category_name
from planner.view.timeline import bars_by_group, streams_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MILLISECOND = 1e6
"""In nanoseconds."""
FAR_LIMIT = 1.5
"""A limit of more than this times the highest peak is not drawn: it would leave no room for the memory."""


def step_figure(opened: OpenedPlan, together: Sequence[OpenedPlan] = ()) -> Figure:
    """Memory on one device by kind over the time of a step, and below it what runs on every stream.

    Parameters
    ----------
    opened
        The plan.
    together
        Plans that are shown side by side: their figures have the same axes.

    Returns
    -------
    Figure
        Milliseconds along both parts; bytes in a unit that the highest peak fills, and streams.
    """
    from plotly.graph_objects import Bar, Scatter
    from plotly.subplots import make_subplots

    shown = together or (opened,)
    streams = streams_of(shown)
    unit, size = axis_unit(max(plan.plan.peak_bytes for plan in shown))
    figure: Figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.62, 0.38])
    memory = opened.plan.decision.predicted.memory
    moments = [opened.starts[max(at, 0)] / MILLISECOND for at in memory.instructions]
    nothing = (0,) * len(moments)
    for category in Category:
        if any(category in plan.plan.decision.predicted.memory.bytes for plan in shown):
            colour, pattern = CATEGORIES[category]
            figure.add_trace(
                Scatter(
                    x=np.array(moments),
                    y=np.array(memory.bytes.get(category, nothing)) / size,
                    name=category_name(category),
                    stackgroup="memory",
                    line={"shape": "hv", "width": 0.5, "color": "black"},
                    fillcolor=colour,
                    fillpattern={"shape": pattern, "fgcolor": "black", "size": 6, "solidity": 0.15},
                    legend="legend",
                    hovertemplate=f"%{{y:.3f}} {unit}",
                ),
                row=1,
                col=1,
            )
    bars = bars_by_group(opened)
    groups = {interval.group for plan in shown for interval in plan.intervals}
    for group in (group for group in GROUPS if group in groups):
        # One without bars has an invisible one, so that figures side by side have equal legends.
        intervals = bars.get(group) or [[Interval(COMPUTATION, group, 0, 0, 0)]]
        colour, pattern = GROUP_STYLE[group]
        figure.add_trace(
            Bar(
                orientation="h",
                base=np.array([entry[0].start for entry in intervals]) / MILLISECOND,
                x=np.array([entry[-1].end - entry[0].start for entry in intervals]) / MILLISECOND,
                y=[entry[0].stream for entry in intervals],
                name=group,
                marker={
                    "color": colour,
                    "line": {"width": 0},
                    "pattern": {"shape": pattern, "fgcolor": "black", "size": 5, "solidity": 0.3},
                },
                customdata=[_described(opened, entry) for entry in intervals],
                hovertemplate="%{customdata}<extra></extra>",
                legend="legend2",
                width=0.8,
            ),
            row=2,
            col=1,
        )
    highest = max(plan.plan.peak_bytes for plan in shown) / size
    near = [limit / size for limit in map(_limit, shown) if limit / size <= FAR_LIMIT * highest]
    if _limit(opened) / size in near:
        figure.add_hline(y=_limit(opened) / size, line={"dash": "dash", "color": "black", "width": 1.5}, row=1, col=1)
        figure.add_annotation(
            xref="x domain",
            x=1,
            y=_limit(opened) / size,
            xanchor="right",
            yanchor="bottom",
            text=f"limit {format_bytes(int(_limit(opened)))}",
            showarrow=False,
        )
    predicted = opened.plan.decision.predicted
    figure.add_annotation(
        x=opened.starts[max(predicted.peak_instruction, 0)] / MILLISECOND,
        y=predicted.peak_bytes / size,
        text=f"peak {format_bytes(predicted.peak_bytes)}",
        showarrow=True,
        ay=-22,
        row=1,
        col=1,
    )
    end = max(plan.starts[-1] for plan in shown) / MILLISECOND
    figure.update_xaxes(range=[0, end * 1.01], showgrid=True)
    figure.update_xaxes(title_text="time of the step (ms)", row=2, col=1)
    figure.update_yaxes(title_text=f"one device ({unit})", range=[0, max([highest, *near]) * 1.2], row=1, col=1)
    figure.update_yaxes(
        categoryorder="array", categoryarray=streams[::-1], range=[-0.6, len(streams) - 0.4], row=2, col=1
    )
    figure.update_layout(
        **chart_layout(360 + 42 * len(streams) + 90),
        barmode="overlay",
        hovermode="closest",
        legend=chart_legend(above=True),
        legend2=chart_legend(above=False),
    )
    return figure


def seconds_figure(opened: OpenedPlan, together: Sequence[OpenedPlan] = ()) -> Figure:
    """Seconds that the computation's stream spends on each kind of instruction; they add up to the objective.

    Parameters
    ----------
    opened, together
        As for :func:`step_figure`.
    """
    from plotly.graph_objects import Bar, Figure

    shown = [seconds_by_kind(plan) for plan in together or (opened,)]
    totals: dict[str, int] = defaultdict(int)
    for seconds in shown:
        for kind, (first, again) in seconds.items():
            totals[kind] = max(totals[kind], first + again)
    kinds = sorted(totals, key=lambda kind: totals[kind])
    mine = seconds_by_kind(opened)
    figure = Figure()
    for part, (name, (colour, pattern)) in enumerate(
        (("first executions", GROUP_STYLE[FORWARD]), (AGAIN, GROUP_STYLE[AGAIN]))
    ):
        values = [mine.get(kind, (0, 0))[part] for kind in kinds]
        figure.add_trace(
            Bar(
                orientation="h",
                y=[kind.replace("_", " ") for kind in kinds],
                x=np.array(values) / MILLISECOND,
                name=name,
                marker={
                    "color": colour,
                    "line": {"color": "black", "width": 0.6},
                    "pattern": {"shape": pattern, "fgcolor": "black", "size": 5, "solidity": 0.3},
                },
                text=[format_seconds(value / 1e9) if value else "" for value in values],
                textposition="none",
                hovertemplate="%{y}, " + name + ": %{text}<extra></extra>",
            )
        )
    for kind in kinds:
        value = sum(mine.get(kind, (0, 0)))
        figure.add_annotation(
            x=value / MILLISECOND,
            y=kind.replace("_", " "),
            text=format_seconds(value / 1e9) if value else "0",
            showarrow=False,
            xanchor="left",
            xshift=4,
        )
    figure.update_xaxes(title_text="time of a step (ms)", range=[0, max(totals.values()) / MILLISECOND * 1.4])
    figure.update_layout(
        **chart_layout(110 + 24 * len(kinds)),
        barmode="stack",
        legend=chart_legend(above=True),
    )
    return figure


def seconds_by_kind(opened: OpenedPlan) -> dict[str, tuple[int, int]]:
    """Nanoseconds on the computation's stream by kind: of first executions, and of recomputation."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for entry, length in zip(opened.schedule.instructions, opened.time.durations, strict=True):
        if length:
            found[kind_of_time(opened.graph, entry)][group_of(opened.graph, entry) == AGAIN] += length
    return {kind: (first, again) for kind, (first, again) in found.items()}


def _limit(opened: OpenedPlan) -> float:
    limit = opened.plan.decision.options.limit_bytes
    return inf if limit is None else limit


def _described(opened: OpenedPlan, bar: Sequence[Interval]) -> str:
    """Text of a bar; plotly reads some tags of HTML in it, so that names are escaped."""
    from html import escape

    first, last = bar[0], bar[-1]
    modules = [module for module, _ in groupby(opened.module(entry.instruction) or "whole step" for entry in bar)]
    what = (
        escape(opened.label(first.instruction))
        if len(bar) == 1
        else f"{len(bar)} instructions of {escape(modules[0])}" + (f" and {len(modules) - 1} more" * (len(modules) > 1))
    )
    return (
        f"{first.group}: {format_seconds((last.end - first.start) / 1e9)}<br>{what}"
        f"<br>from {format_seconds(first.start / 1e9)}, instruction {first.instruction}"
    )


def chart_legend(*, above: bool) -> dict[str, Any]:
    """A legend along the upper or lower edge, which takes as many lines as it needs."""
    edge = {"y": 1, "yanchor": "top"} if above else {"y": 0, "yanchor": "bottom"}
    return {"orientation": "h", "yref": "container", **edge, "x": 0, "traceorder": "normal"}


def chart_layout(height: int) -> dict[str, Any]:
    """What all charts have in common; pixels of height."""
    return {
        "template": "simple_white",
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "black"},
        "dragmode": "zoom",
    }
