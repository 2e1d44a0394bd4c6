"""Figures of benchmarks: gaps of solvers over time, and performance profiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.benchmarks.performance_profile import profiles, ratios_to_fastest
from planner.benchmarks.rows import BenchRow
from planner.common.units import format_gap
from planner.view.styles import line_style, plain_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EARLIEST_SECOND = 1e-3
SMALLEST_GAP_PERCENT = 0.01


def performance_profile(rows: Sequence[BenchRow], target_gap: float = 1e-3) -> Figure:
    """Gap over time of every solver of a benchmark, and on how many instances it is closed.

    Parameters
    ----------
    rows
        Rows of one benchmark, :attr:`planner.benchmarks.BenchResult.rows`; those of one instance show that
        instance alone.
    target_gap
        Gap up to which an instance counts as solved.

    Returns
    -------
    Figure
        Left the mean gap over the instances in per cent, 100 % where an incumbent or a bound is missing;
        right the share of the instances within ``target_gap``; both over seconds as the rows count them.

    Raises
    ------
    ValueError
        If there are no rows.
    """
    from matplotlib import pyplot

    if not rows:
        raise ValueError("there are no rows to draw; run a benchmark or load one first")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.0, 4.0), layout="constrained", sharex=True)
    made = profiles(rows, target_gap)
    for number, profile in enumerate(made):
        colour, line = line_style(number)
        style = {"where": "post", "color": colour, "linestyle": line, "label": profile.solver}
        left.step(profile.seconds, 100 * profile.mean_gap, **style)
        right.step(profile.seconds, 100 * profile.share_within, **style)
    first = min((second for second in made[0].seconds if second > 0), default=EARLIEST_SECOND)
    left.set_xscale("log")
    left.set_xlim(left=max(first, EARLIEST_SECOND))
    plain_ticks(left.xaxis)
    left.set_yscale("symlog", linthresh=SMALLEST_GAP_PERCENT)
    left.yaxis.set_major_formatter("{x:g}")
    lowest = min(100 * float(profile.mean_gap.min()) for profile in made)
    left.set_ylim(lowest / 2 if lowest > SMALLEST_GAP_PERCENT else 0, 100)
    right.set_ylim(0, 102)
    count = len({row.instance for row in rows})
    left.set(xlabel="time (s)", ylabel="mean gap (%)", title=f"{count} instances" if count > 1 else rows[0].instance)
    right.set(xlabel="time (s)", ylabel="instances (%)", title=f"gap at most {format_gap(target_gap)}")
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    pyplot.close(figure)
    return figure


def time_ratios(rows: Sequence[BenchRow], target_gap: float = 1e-3) -> Figure:
    """Performance profiles: on how many instances a solver is within a factor of the fastest (Dolan and Moré 2002).

    Parameters
    ----------
    rows
        Rows of one benchmark.
    target_gap
        Gap up to which an instance counts as solved.

    Returns
    -------
    Figure
        Share of the instances over the ratio of the time to ``target_gap`` to that of the fastest solver. Instances
        that no solver solves count as solved by none.

    Raises
    ------
    ValueError
        No solver solves any instance.
    """
    from matplotlib import pyplot

    ratios = ratios_to_fastest(rows, target_gap)
    finite = [ratio for found in ratios.values() for ratio in found if np.isfinite(ratio)]
    if not finite:
        raise ValueError(f"no instance was solved to a gap of {format_gap(target_gap)}: give a larger target_gap")
    last = 1.2 * max(max(finite), 2.0)
    figure, axes = pyplot.subplots(figsize=(7.5, 4.0), layout="constrained")
    for number, (solver, found) in enumerate(ratios.items()):
        colour, line = line_style(number)
        solved = np.sort([ratio for ratio in found if np.isfinite(ratio)])
        shares = 100 * np.arange(len(solved) + 1) / len(found)
        axes.step([1.0, *solved, last], [*shares, shares[-1]], where="post", color=colour, linestyle=line, label=solver)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(1.0, last)
    axes.set_ylim(0, 102)
    axes.set(
        xlabel="time, as a multiple of the fastest solver's",
        ylabel="instances (%)",
        title=f"gap at most {format_gap(target_gap)}, {len(next(iter(ratios.values())))} instances",
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    pyplot.close(figure)
    return figure
