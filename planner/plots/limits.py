"""Figures over the memory limit and over the number of layers: what memory is worth, and what solving costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.view.styles import line_style, marker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIBIBYTE = 2**30


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """Result of a plan under one limit.

    Parameters
    ----------
    limit_bytes
        Bytes that one device may hold.
    objective_seconds
        Predicted seconds of a step of the plan; None where none was found.
    bound_seconds
        Proven lower bound of all plans within this limit; None where there is none.
    """

    limit_bytes: float
    objective_seconds: float | None
    bound_seconds: float | None


def pareto_curve(curves: Mapping[str, Sequence[ParetoPoint]], title: str) -> Figure:
    """Seconds of a step over the memory limit, with a band from the bounds to the plans, below which there is no plan.

    A plan holds under every larger limit too, and a bound for every smaller one. So the upper edge is a staircase of
    the best plan up to each limit, and the lower edge one of the best bound from each limit on.

    Parameters
    ----------
    curves
        Name, such as that of a formulation, -> results in any order.
    title
        Of the figure.

    Raises
    ------
    ValueError
        A curve has no plan.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.0, 4.0), layout="constrained")
    for number, (name, given) in enumerate(curves.items()):
        points = sorted(given, key=lambda point: point.limit_bytes)
        if all(point.objective_seconds is None for point in points):
            raise ValueError(f"{name} has no plan to draw: give points with an objective")
        (colour, line), limits = line_style(number), np.array([point.limit_bytes for point in points]) / GIBIBYTE
        best = np.minimum.accumulate(_numbers([point.objective_seconds for point in points], np.inf))
        proved = np.maximum.accumulate(_numbers([point.bound_seconds for point in points], -np.inf)[::-1])[::-1]
        best[np.isinf(best)], proved[np.isinf(proved)] = np.nan, np.nan
        axes.step(limits, best, where="post", color=colour, linestyle=line, marker=marker(number), label=name)
        if not np.isnan(proved).all():
            axes.step(limits, proved, where="pre", color=colour, linestyle=":", linewidth=1)
            axes.fill_between(
                np.repeat(limits, 2)[1:-1],
                np.repeat(proved[1:], 2),
                np.repeat(best[:-1], 2),
                color=colour,
                alpha=0.25,
                linewidth=0,
                label=f"{name}: from its bound to its plan",
            )
    axes.set(xlabel="limit on one device (GiB)", ylabel="time of a step (s)", title=title)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    pyplot.close(figure)
    return figure


def _numbers(values: Sequence[float | None], missing: float) -> NDArray[np.float64]:
    return np.array([missing if value is None else value for value in values], dtype=np.float64)


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
    for number, (name, points) in enumerate(curves.items()):
        limits, extra = np.array(sorted(points), dtype=np.float64).reshape(-1, 2).T
        colour, line = line_style(number)
        axes.plot(limits, extra, marker=marker(number), color=colour, linestyle=line, label=name)
    for label, limit in (floors or {}).items():
        axes.axvline(limit, color="black", linestyle=":", label=label)
    axes.set(xlabel="limit on one device (GB)", ylabel="extra time of a step (%)", title=title)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    pyplot.close(figure)
    return figure


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

    figure, axes = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
    for number, (name, points) in enumerate(curves.items()):
        layers, seconds = zip(*sorted(points), strict=True)
        colour, line = line_style(number)
        axes.plot(layers, seconds, marker=marker(number), color=colour, linestyle=line, label=name)
    axes.set(xlabel="layers (count)", ylabel="time to the result (s)", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    pyplot.close(figure)
    return figure
