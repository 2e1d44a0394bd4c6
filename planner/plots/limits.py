"""Figures over the memory limit and over the number of layers: what memory is worth, and what solving costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.plots.panels import panels
from planner.view.styles import line_style, marker

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def overhead_over_memory(
    curves: Mapping[str, Sequence[tuple[float, float]]], title: str, floors: Mapping[str, float] | None = None
) -> Figure:
    """Extra time of a step over the memory limit, one line for each formulation.

    Parameters
    ----------
    curves
        Formulation -> pairs of limit (GB) and extra time (% of the fastest step without a limit), at limits where it
        has a plan.
    title
        Of the figure.
    floors
        Label -> limit (GB), drawn as vertical lines: what others report as their smallest.

    Returns
    -------
    Figure
        Extra time grows where the limit falls, to the left; a line ends where no plan was found any more.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.0, 4.0), layout="constrained")
    _lines(axes, curves)
    for label, limit in (floors or {}).items():
        axes.axvline(limit, color="black", linestyle=":", label=label)
    axes.set(xlabel="limit on one device (GB)", ylabel="extra time of a step (%)", title=title)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    pyplot.close(figure)
    return figure


def overhead_by_group(
    groups: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    title: str,
    xlabel: str = "limit on one device (GB)",
) -> Figure:
    """Extra time of a step over the memory limit as :func:`overhead_over_memory`, a panel for each group of curves.

    Parameters
    ----------
    groups
        Name of a group, such as a paper, -> its curves; where all have the same names, there is one legend.
    title
        Of the figure.
    xlabel
        What the limits are, with their unit.
    """
    from matplotlib import pyplot

    is_shared = len({tuple(curves) for curves in groups.values()}) == 1
    figure, grid = panels(len(groups), title, xlabel, "extra time of a step (%)")
    for axes, (group, curves) in zip(grid, groups.items(), strict=True):
        _lines(axes, curves)
        axes.set_title(group, fontsize="medium")
        if curves and not is_shared:
            axes.legend(fontsize="small")
    if is_shared:
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    pyplot.close(figure)
    return figure


def _lines(axes: Axes, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw each curve narrower, with smaller and hollow markers, than those before: none hides another."""
    for number, (name, points) in enumerate(curves.items()):
        limits, extra = np.array(sorted(points), dtype=np.float64).reshape(-1, 2).T
        colour, line = line_style(number)
        below = len(curves) - 1 - number
        axes.plot(
            limits,
            extra,
            marker=marker(number),
            markersize=5 + 2.5 * below,
            markerfacecolor="none",
            color=colour,
            linestyle=line,
            linewidth=1.5 + below,
            label=name,
        )


def seconds_over_layers(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> Figure:
    """Time of a solver over the number of layers, one line for each formulation.

    Parameters
    ----------
    curves
        Formulation -> pairs of layers and seconds.
    title
        Of the figure.
    """
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
    for number, (name, points) in enumerate(curves.items()):
        layers, seconds = zip(*sorted(points), strict=True)
        colour, line = line_style(number)
        axes.plot(layers, seconds, marker=marker(number), color=colour, linestyle=line, label=name)
    axes.set(xlabel="layers (count)", ylabel="time to the result (s)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    pyplot.close(figure)
    return figure
