"""Plans of layers as strips: a row for each plan, a bar for each run of layers, divided into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = (
    ("#ffffff", ""),
    ("#cfe2f3", "//"),
    ("#f9cb9c", ".."),
    ("#b6d7a8", "xx"),
    ("#d9d2e9", "\\\\"),
    ("#8c8c8c", ""),
    ("#ffe599", "--"),
    ("#ea9999", "++"),
    ("#a2c4c9", "oo"),
    ("#434343", ""),
)

Runs = Sequence[Sequence[tuple[int, str]]]
"""Of every stage, its runs of layers: number of layers and strategy."""


def strips_of_plans(plans: Mapping[str, Runs], title: str) -> Figure:
    """Strategies over the layers of several plans, one strip each; a gap with a thick line divides stages.

    Parameters
    ----------
    plans
        By label: runs of every stage.
    title
        Above the figure.
    """
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(10.0, 1.6 + 0.55 * len(plans)), layout="constrained")
    kinds = dict.fromkeys(strategy for stages in plans.values() for runs in stages for _, strategy in runs)
    styles = {kind: STYLES[number % len(STYLES)] for number, kind in enumerate(kinds)}
    for place, stages in enumerate(plans.values()):
        first = 0
        for number, runs in enumerate(stages):
            if number:
                axes.plot([first, first], [place - 0.48, place + 0.48], color="black", linewidth=4)
            for count, strategy in runs:
                colour, hatch = styles[strategy]
                axes.barh(place, count, left=first, height=0.7, color=colour, hatch=hatch, edgecolor="black")
                first += count
    axes.set_yticks(range(len(plans)), list(plans))
    axes.invert_yaxis()
    axes.set(xlabel="layer", ylabel="plan", title=title)
    axes.margins(x=0.01)
    handles = [Patch(facecolor=c, hatch=h, edgecolor="black", label=kind) for kind, (c, h) in styles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), handleheight=1.6)
    pyplot.close(figure)
    return figure
