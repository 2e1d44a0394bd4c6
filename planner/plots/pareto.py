"""Seconds of a step over the memory limit, with a band from proven bounds to the best plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.common.units import axis_unit
from planner.plots.panels import panels
from planner.view.styles import line_style, marker

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAME = 0.003
"""Distance of curves that the eye cannot tell apart, as a share of the range of the seconds."""


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


@dataclass(frozen=True, slots=True)
class _Staircase:
    """Limits (bytes), the best plan up to each and the best bound from each on (s); nan where there is none."""

    limits: NDArray[np.float64]
    best: NDArray[np.float64]
    proved: NDArray[np.float64]

    def is_same(self, other: _Staircase, within: float) -> bool:
        """Whether no value is farther than `within` seconds from that of the other."""
        return all(
            len(mine) == len(theirs) and np.allclose(mine, theirs, rtol=0, atol=tolerance, equal_nan=True)
            for mine, theirs, tolerance in (
                (self.limits, other.limits, 0.0),
                (self.best, other.best, within),
                (self.proved, other.proved, within),
            )
        )


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

    Returns
    -------
    Figure
        A panel for each curve, with the plans of the others in grey, all with the same axes; curves that cannot be
        told apart share a panel.

    Raises
    ------
    ValueError
        A curve has no plan.
    """
    from matplotlib import pyplot

    stairs = {name: _staircase(name, points) for name, points in curves.items()}
    every = np.concatenate([np.concatenate((found.best, found.proved)) for found in stairs.values()])
    same = SAME * float(np.nanmax(every) - np.nanmin(every))
    unit, size = axis_unit(max(found.limits.max() for found in stairs.values()))
    shown: dict[tuple[str, ...], _Staircase] = {}
    for name, found in stairs.items():
        names = next((names for names, other in shown.items() if found.is_same(other, same)), ())
        shown[(*names, name)] = shown.pop(names, found)
    figure, grid = panels(len(shown), title, f"limit on one device ({unit})", "time of a step (s)")
    for number, (axes, (names, found)) in enumerate(zip(grid, shown.items(), strict=True)):
        label = "plans of others"
        for other in shown.values():
            if other is not found:
                axes.step(other.limits / size, other.best, where="post", color="#999999", linewidth=0.8, label=label)
                label = "_"  # one entry of the legend for all
        _draw(axes, " = ".join(names), found, size, number)
    pyplot.close(figure)
    return figure


def _draw(axes: Axes, name: str, found: _Staircase, size: int, number: int) -> None:
    colour, _ = line_style(number)
    limits = found.limits / size
    axes.step(limits, found.best, where="post", color=colour, marker=marker(number), markersize=5, label="plan")
    if not np.isnan(found.proved).all():
        axes.step(limits, found.proved, where="pre", color=colour, linestyle=":", label="bound")
        axes.fill_between(
            np.repeat(limits, 2)[1:-1],
            np.repeat(found.proved[1:], 2),
            np.repeat(found.best[:-1], 2),
            facecolor="none",
            edgecolor=colour,
            hatch="///",
            linewidth=0,
        )
    axes.set_title(name, fontsize="medium")
    axes.legend(fontsize="small", loc="upper right")


def _staircase(name: str, given: Sequence[ParetoPoint]) -> _Staircase:
    points = sorted(given, key=lambda point: point.limit_bytes)
    if all(point.objective_seconds is None for point in points):
        raise ValueError(f"{name} has no plan to draw: give points with an objective")
    best = np.minimum.accumulate(_numbers([point.objective_seconds for point in points], np.inf))
    proved = np.maximum.accumulate(_numbers([point.bound_seconds for point in points], -np.inf)[::-1])[::-1]
    best[np.isinf(best)], proved[np.isinf(proved)] = np.nan, np.nan
    return _Staircase(np.array([point.limit_bytes for point in points], dtype=np.float64), best, proved)


def _numbers(values: Sequence[float | None], missing: float) -> NDArray[np.float64]:
    return np.array([missing if value is None else value for value in values], dtype=np.float64)
