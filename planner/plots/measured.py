"""Predicted against measured figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.view.styles import line_style, marker, plain_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def predicted_and_measured(
    points: Mapping[str, Sequence[tuple[float, float]]], quantity: str, unit: str, tolerance: float = 0.1
) -> Figure:
    """Measured over predicted figures, with the diagonal and a tolerance around it.

    Parameters
    ----------
    points
        Name of a group, such as a kind of instruction or a model, -> pairs of a predicted and a measured figure.
    quantity, unit
        What the figures are, such as ``time of a step`` and ``s``.
    tolerance
        Relative distance of the lines beside the diagonal.

    Returns
    -------
    Figure
        Both axes logarithmic and equal; the legend has the median of measured over predicted of each group.

    Raises
    ------
    ValueError
        There are no points, or one is not positive.
    """
    from matplotlib import pyplot

    every = np.array([pair for pairs in points.values() for pair in pairs], dtype=np.float64).reshape(-1, 2)
    if not every.size or every.min() <= 0:
        raise ValueError("predicted and measured figures must be there and positive; leave out those that are 0")
    low, high = every.min() / 1.5, every.max() * 1.5
    figure, axes = pyplot.subplots(figsize=(5.5, 5.5), layout="constrained")
    axes.plot([low, high], [low, high], color="black", linewidth=1, label="equal")
    for factor, label in ((1 + tolerance, f"{tolerance:.0%} more or less"), (1 / (1 + tolerance), None)):
        axes.plot([low, high], [low * factor, high * factor], color="black", linewidth=0.8, linestyle=":", label=label)
    for number, (name, pairs) in enumerate(points.items()):
        predicted, measured = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        median = float(np.median(measured / predicted))
        axes.plot(
            predicted,
            measured,
            linestyle="none",
            marker=marker(number),
            markersize=5,
            markerfacecolor=line_style(number)[0],
            markeredgecolor="black",
            markeredgewidth=0.5,
            label=f"{name}, median {median:.2f}",
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), box_aspect=1)
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    axes.set(xlabel=f"predicted {quantity} ({unit})", ylabel=f"measured {quantity} ({unit})")
    axes.legend(fontsize="small")  # where it hides the fewest points
    pyplot.close(figure)
    return figure
