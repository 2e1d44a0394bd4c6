"""Colours with a hatch each, so that figures and pages are readable in black and white; ticks as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, log10
from typing import TYPE_CHECKING

from planner.replay.report import Category
from planner.view.naming import COPY_IN, COPY_OUT, LOCAL_RESHARD, UPDATE
from planner.view.streams import AGAIN, BACKWARD, BESIDE, BLOCKING, FORWARD, STALL

if TYPE_CHECKING:
    from matplotlib.axis import Axis

Style = tuple[str, str]
"""A colour, and a hatch as plotly and matplotlib both know it: empty, or one of ``/ \\ x . - | +``."""

CATEGORIES: Mapping[Category, Style] = {
    Category.PARAMETERS: ("#1f4e79", ""),
    Category.MODULE_BUFFERS: ("#7f7f7f", "."),
    Category.OPTIMIZER: ("#8db4d9", "/"),
    Category.INPUTS: ("#444444", "x"),
    Category.GRADIENTS: ("#c55a11", "\\"),
    Category.ACTIVATIONS: ("#a9d18e", ""),
    Category.RESHARDED: ("#ffd966", "x"),
    Category.WORKSPACE: ("#bf9fcf", "."),
}
GROUP_STYLE: Mapping[str, Style] = {
    FORWARD: ("#cfe2f3", ""),
    BACKWARD: ("#3d6d99", ""),
    AGAIN: ("#e69138", "/"),
    UPDATE: ("#8c8c8c", ""),
    LOCAL_RESHARD: ("#b6d7a8", "-"),
    BLOCKING: ("#a61c00", "x"),
    BESIDE: ("#d5a6bd", "\\"),
    COPY_OUT: ("#674ea7", "|"),
    COPY_IN: ("#b4a7d6", "|"),
    STALL: ("#ffffff", "+"),
}
"""Of groups of instructions on a timeline."""
LINES: tuple[Style, ...] = (
    ("#1f4e79", "-"),
    ("#c55a11", "--"),
    ("#3a7d2c", "-."),
    ("#674ea7", ":"),
    ("#7f7f7f", "-"),
    ("#a61c00", "--"),
    ("#000000", "-."),
)
"""Colours and line styles of curves, in this order."""
MARKERS = "osv^D*Px"


def category_name(category: Category) -> str:
    """Name of a category for readers, which says more than that of plan files."""
    names = {Category.OPTIMIZER: "optimizer state", Category.RESHARDED: "resharded copies"}
    return names.get(category, category.replace("_", " "))


def line_style(number: int) -> Style:
    """Colour and line style of a curve by its number."""
    return LINES[number % len(LINES)]


def marker(number: int) -> str:
    """Marker of a curve by its number."""
    return MARKERS[number % len(MARKERS)]


def plain_ticks(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers: powers of ten, and where these are few, 2 and 5 times them."""
    from matplotlib.ticker import FuncFormatter

    low, high = axis.get_view_interval()
    few = log10(high / low) < 2

    def minor(value: float, _: float) -> str:
        digit = round(value / 10 ** floor(log10(value)))
        return f"{value:g}" if few and digit in (2, 5) else ""

    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(FuncFormatter(minor))
