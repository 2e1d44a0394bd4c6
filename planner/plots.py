"""Figures for notebooks: memory of a plan over time, placements by module, and gaps of solvers over time.

matplotlib is imported when a figure is drawn; every function returns the figure and shows nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.benchmarks.performance_profile import profiles
from planner.benchmarks.rows import BenchRow
from planner.common.units import format_gap
from planner.graph.operator_graph import module_prefix
from planner.graph.placement import is_partial, is_shard
from planner.plan.format import ComputeStep, Plan
from planner.replay.report import Category

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIBIBYTE = 2**30
EARLIEST_SECOND = 1e-3
SMALLEST_GAP_PERCENT = 0.01
MARKERS = "osv^D*Px"
PLACEMENT_COLOURS = {"replicated": "#9aa5b1", "sharded": "#2f6f9f", "partial": "#d98032"}


def memory_over_time(plan: Plan) -> Figure:
    """Predicted bytes on one device during the step, by category, with the limit.

    Parameters
    ----------
    plan
        Any plan; its own prediction is drawn, nothing is replayed.

    Returns
    -------
    Figure
        Gibibytes over the instructions of the schedule; between two points the highest moment is shown.
    """
    from matplotlib import color_sequences, pyplot

    predicted, limit = plan.decision.predicted, plan.decision.options.limit_bytes
    figure, axes = pyplot.subplots(figsize=(9.0, 4.0), layout="constrained")
    held = [category for category in Category if category in predicted.memory.bytes]  # what stays longest lies lowest
    axes.stackplot(
        predicted.memory.instructions,
        *(np.array(predicted.memory.bytes[category]) / GIBIBYTE for category in held),
        labels=[category.replace("_", " ") for category in held],
        colors=color_sequences["tab10"],
    )
    if limit is not None:
        axes.axhline(limit / GIBIBYTE, color="black", linestyle="--", label="limit")
    axes.annotate(
        "peak",
        (predicted.peak_instruction, predicted.peak_bytes / GIBIBYTE),
        textcoords="offset points",
        xytext=(0, 6),
        ha="center",
    )
    axes.set(xlabel="instruction of the schedule", ylabel="bytes on one device (GiB)", title=_title(plan))
    axes.margins(x=0, y=0.12)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    pyplot.close(figure)
    return figure


def placements_by_module(plan: Plan, depth: int = 3) -> Figure:
    """Placements of the results of each module's operators, first executions only.

    Parameters
    ----------
    plan
        Any plan.
    depth
        Number of leading parts of a module path that distinguish modules.

    Returns
    -------
    Figure
        Per module the number of results that are replicated on every axis, sharded on some axis, or
        partial on some axis (to be reduced later).
    """
    from matplotlib import pyplot

    counts = placement_counts(plan, depth)
    figure, axes = pyplot.subplots(figsize=(9.0, 1.2 + 0.22 * len(counts)), layout="constrained")
    names = list(counts)
    left = np.zeros(len(names))
    for kind, colour in PLACEMENT_COLOURS.items():
        width = np.array([counts[name][kind] for name in names])
        axes.barh(names, width, left=left, color=colour, label=kind)
        left += width
    axes.invert_yaxis()
    axes.set(xlabel="results of operators (count)", ylabel="module", title=_title(plan))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    pyplot.close(figure)
    return figure


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
    for profile in made:
        left.step(profile.seconds, 100 * profile.mean_gap, where="post", label=profile.solver)
        right.step(profile.seconds, 100 * profile.share_within, where="post", label=profile.solver)
    first = min((second for second in made[0].seconds if second > 0), default=EARLIEST_SECOND)
    left.set_xscale("log")
    left.set_xlim(left=max(first, EARLIEST_SECOND))
    left.set_yscale("symlog", linthresh=SMALLEST_GAP_PERCENT)
    lowest = min(100 * float(profile.mean_gap.min()) for profile in made)
    left.set_ylim(lowest / 2 if lowest > SMALLEST_GAP_PERCENT else 0, 100)
    right.set_ylim(0, 102)
    count = len({row.instance for row in rows})
    left.set(xlabel="time (s)", ylabel="mean gap (%)", title=f"{count} instances" if count > 1 else rows[0].instance)
    right.set(xlabel="time (s)", ylabel="instances (%)", title=f"gap at most {format_gap(target_gap)}")
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    pyplot.close(figure)
    return figure


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
        axes.plot(limits, extra, marker=MARKERS[number % len(MARKERS)], label=name)
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
        axes.plot(layers, seconds, marker=MARKERS[number % len(MARKERS)], label=name)
    axes.set(xlabel="layers (count)", ylabel="time to the result (s)", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    pyplot.close(figure)
    return figure


def placement_counts(plan: Plan, depth: int) -> dict[str, Counter[str]]:
    """Per module, in order of execution, how many results are ``replicated``, ``sharded`` or ``partial``."""
    decision = plan.decision
    counts: dict[str, Counter[str]] = {}
    for step in decision.schedule.instructions:
        if not isinstance(step, ComputeStep) or step.op != "compute":
            continue
        path = decision.operators[step.operator].split("/", 1)[0]
        kinds = counts.setdefault(module_prefix(path, depth), Counter())
        for buffer in step.outputs:
            if buffer is not None:
                kinds[_kind(decision.schedule.placements[decision.schedule.buffers[buffer][1]])] += 1
    return counts


def _kind(placement: tuple[str, ...]) -> str:
    if any(map(is_partial, placement)):
        return "partial"
    return "sharded" if any(map(is_shard, placement)) else "replicated"


def _title(plan: Plan) -> str:
    options = plan.decision.options
    return f"{plan.decision.model.source} on mesh {'x'.join(map(str, options.mesh))} of {options.cluster}"
