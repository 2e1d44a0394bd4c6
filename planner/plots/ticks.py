"""Ticks of logarithmic axes as plain numbers."""

from __future__ import annotations

from math import floor, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axis import Axis


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
