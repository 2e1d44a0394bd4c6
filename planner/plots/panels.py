"""Small multiples: panels of one figure that share their axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def panels(count: int, title: str, xlabel: str, ylabel: str) -> tuple[Figure, list[Axes]]:
    """Figure of `count` panels with the same axes, up to three beside each other, labelled at its edges."""
    from matplotlib import pyplot

    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    height = 4.0 if rows == 1 else 0.7 + 2.6 * rows
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(9.0, height), layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    every = list(grid.flat)
    for spare in every[count:]:
        spare.remove()
    for number, axes in enumerate(every[:count]):
        if number + columns >= count:  # none below it
            axes.set_xlabel(xlabel)
            axes.tick_params(labelbottom=True)
        if number % columns == 0:
            axes.set_ylabel(ylabel)
    figure.suptitle(title)
    return figure, every[:count]
