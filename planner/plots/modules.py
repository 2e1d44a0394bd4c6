"""Seconds and bytes of a plan by module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.common.units import axis_unit
from planner.view.modules import Figures, Module

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MILLISECOND = 1e6
"""In nanoseconds."""
TIMES = {
    "first executions": ("compute_ns", "#cfe2f3", ""),
    "recomputed": ("again_ns", "#e69138", "/"),
    "communication": ("collective_ns", "#a61c00", "x"),
    "optimizer": ("update_ns", "#8c8c8c", ""),
}
BYTES = {
    "parameters and optimizer state": ("state_bytes", "#8db4d9", "/"),
    "other": ("other_bytes", "#a9d18e", ""),
}


def modules_of_plan(tree: Module, depth: int = 3) -> Figure:
    """Seconds of a step and bytes at the peak by module.

    Parameters
    ----------
    tree
        Modules of a plan, :func:`planner.view.modules.module_tree`.
    depth
        Number of leading parts of a module path that distinguish modules.

    Returns
    -------
    Figure
        Left milliseconds of a step, right bytes on one device at the peak, in a unit that the largest module fills;
        both add up to those of the plan.
    """
    from matplotlib import pyplot

    shown = _folded(tree, depth)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11.0, 1.6 + 0.22 * len(shown)), layout="constrained", sharey=True
    )
    _bars(left, shown, TIMES, MILLISECOND)
    unit, size = axis_unit(max((figures.peak_bytes for figures in shown.values()), default=0))
    _bars(right, shown, BYTES, size)
    left.invert_yaxis()
    left.set(xlabel="time of a step (ms)", ylabel="module")
    right.set(xlabel=f"one device at the peak ({unit})")
    pyplot.close(figure)
    return figure


def _folded(tree: Module, depth: int) -> dict[str, Figures]:
    found: dict[str, Figures] = {}
    for module in tree.walk():
        level = len(module.path.split(".")) if module.path else 0
        figures = module.all if level == depth else module.own if level < depth else None
        if figures is not None and (figures.total_ns or figures.peak_bytes):
            found[module.path or "(no module)"] = figures
    return found


def _bars(axes: Axes, shown: dict[str, Figures], parts: dict[str, tuple[str, str, str]], scale: float) -> None:
    names, left = list(shown), np.zeros(len(shown))
    for label, (field, colour, hatch) in parts.items():
        width = _widths(list(shown.values()), field, scale)
        if width.any():
            axes.barh(
                names, width, left=left, color=colour, hatch=2 * hatch, edgecolor="black", linewidth=0.4, label=label
            )
        left += width
    axes.use_sticky_edges = False  # a part of no width would hold the frame at its end
    axes.margins(x=0.04)
    axes.set_xlim(left=0)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _widths(figures: Sequence[Figures], field: str, scale: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([getattr(entry, field) for entry in figures], dtype=np.float64) / scale
