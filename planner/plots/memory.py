"""Figures of a plan: memory over time with the tensors of its peak, and placements by module."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from planner.common.units import axis_unit, format_bytes
from planner.graph.operator_graph import module_prefix
from planner.graph.placement import placement_kind
from planner.plan.decision import ComputeStep
from planner.plan.format import Plan
from planner.replay.report import Category
from planner.view.charts import FAR_LIMIT
from planner.view.opened import OpenedPlan
from planner.view.peak import at_peak, placement_of
from planner.view.styles import CATEGORIES, category_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TENSORS_NAMED = 6
"""Tensors alive at the peak that a figure names."""
NAME_LENGTH = 64
"""Characters of a tensor's name in a figure."""
PLACEMENT_STYLES = {"replicated": ("#9aa5b1", ""), "sharded": ("#2f6f9f", ""), "partial": ("#f0c9a5", "/")}


def memory_over_time(plan: Plan | OpenedPlan) -> Figure:
    """Predicted bytes on one device during the step, by category, with the limit unless it is far above.

    Parameters
    ----------
    plan
        Any plan; its own prediction is drawn, nothing is replayed. One that is opened in its session
        (:func:`planner.view.opened.open_plan`) has names too: the largest tensors alive at the peak are bars below.

    Returns
    -------
    Figure
        Bytes over the instructions of the schedule, in a unit that the peak fills; between two points the highest
        moment is shown. Bytes of tensors below.
    """
    from matplotlib import pyplot

    opened, plan = (plan, plan.plan) if isinstance(plan, OpenedPlan) else (None, plan)
    if opened is None:
        figure, above = pyplot.subplots(figsize=(9.0, 4.0), layout="constrained")
    else:
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=(9.0, 6.0), layout="constrained", height_ratios=(4.0, 2.0)
        )
        _largest_at_peak(below, opened)
    _over_time(above, plan)
    pyplot.close(figure)
    return figure


def _over_time(axes: Axes, plan: Plan) -> None:
    predicted, limit = plan.decision.predicted, plan.decision.options.limit_bytes
    unit, size = axis_unit(predicted.peak_bytes)
    held = [category for category in Category if category in predicted.memory.bytes]  # what stays longest lies lowest
    layers = axes.stackplot(
        predicted.memory.instructions,
        *(np.array(predicted.memory.bytes[category]) / size for category in held),
        labels=[category_name(category) for category in held],
        colors=[CATEGORIES[category][0] for category in held],
        edgecolor="black",
        linewidth=0.4,
    )
    for category, layer in zip(held, layers, strict=True):
        layer.set_hatch(2 * CATEGORIES[category][1])
    at, peak = predicted.peak_instruction, predicted.peak_bytes / size
    top = peak
    if limit is not None and limit <= FAR_LIMIT * predicted.peak_bytes:
        top = max(peak, limit / size)
        axes.axhline(limit / size, color="black", linestyle="--", label=f"limit, {format_bytes(limit)}")
    elif limit is not None:
        axes.plot([], [], color="black", linestyle="--", label=f"limit, {format_bytes(limit)}, far above")
    axes.plot([at], [peak], "v", color="black", clip_on=False, label=f"peak, {format_bytes(predicted.peak_bytes)}")
    axes.set(xlabel="instruction of the schedule", ylabel=f"bytes on one device ({unit})", title=_title(plan))
    axes.margins(x=0)
    axes.set_ylim(0, 1.12 * top)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)


def _largest_at_peak(axes: Axes, opened: OpenedPlan) -> None:
    """A bar for each of the largest tensors and one for all others, the names behind them."""
    found = at_peak(opened.report, TENSORS_NAMED)
    rows = [(t.nbytes, _shortened(t.name), placement_of(t), t.category) for t in found.largest]
    most = max((nbytes for nbytes, *_ in rows), default=0)
    unit, size = axis_unit(most)
    longest = most / size
    for number, (nbytes, name, placement, category) in enumerate(rows):
        colour, hatch = CATEGORIES[category]
        axes.barh(number, nbytes / size, color=colour, hatch=2 * hatch, edgecolor="black", linewidth=0.4)
        axes.text(
            1.04 * longest, number, f"{name} {placement}, {category_name(category)}", va="center", fontsize="small"
        )
    axes.set(yticks=range(len(rows)), yticklabels=[format_bytes(nbytes) for nbytes, *_ in rows], ylabel="tensor")
    axes.set_xlim(0, 4 * longest)  # names take three quarters
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= longest])
    axes.xaxis.set_label_coords(0, -0.22)
    axes.xaxis.label.set_horizontalalignment("left")
    axes.invert_yaxis()
    rest = f"{len(found.others)} more hold {format_bytes(found.other_bytes)}" if found.others else "no others"
    axes.set_title(f"largest tensors alive at the peak; {rest}", loc="left", fontsize="medium")
    axes.set_xlabel(f"bytes of a tensor on one device ({unit})")
    axes.spines[["top", "right"]].set_visible(False)


def _shortened(name: str) -> str:
    """A name without its middle where it is long: the module and the operator tell tensors apart."""
    half = NAME_LENGTH // 2
    return name if len(name) <= NAME_LENGTH else f"{name[: half - 2]} ... {name[-half + 3 :]}"


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
    for kind, (colour, hatch) in PLACEMENT_STYLES.items():
        width = np.array([counts[name][kind] for name in names])
        axes.barh(names, width, left=left, color=colour, hatch=2 * hatch, edgecolor="black", linewidth=0.4, label=kind)
        left += width
    axes.invert_yaxis()
    axes.set(xlabel="results of operators (count)", ylabel="module", title=_title(plan))
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
                placement = decision.schedule.placements[decision.schedule.buffers[buffer][1]]
                kinds[placement_kind(placement)] += 1
    return counts


def _title(plan: Plan) -> str:
    options = plan.decision.options
    return f"{plan.decision.model.source} on mesh {'x'.join(map(str, options.mesh))} of {options.cluster}"
