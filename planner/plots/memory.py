"""Figures of a plan from its file alone: memory over time, and placements by module."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from planner.graph.operator_graph import module_prefix
from planner.graph.placement import placement_kind
from planner.plan.decision import ComputeStep
from planner.plan.format import Plan
from planner.replay.report import Category
from planner.view.styles import CATEGORIES, category_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIBIBYTE = 2**30
PLACEMENT_STYLES = {"replicated": ("#9aa5b1", ""), "sharded": ("#2f6f9f", ""), "partial": ("#f0c9a5", "/")}


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
    from matplotlib import pyplot

    predicted, limit = plan.decision.predicted, plan.decision.options.limit_bytes
    figure, axes = pyplot.subplots(figsize=(9.0, 4.0), layout="constrained")
    held = [category for category in Category if category in predicted.memory.bytes]  # what stays longest lies lowest
    layers = axes.stackplot(
        predicted.memory.instructions,
        *(np.array(predicted.memory.bytes[category]) / GIBIBYTE for category in held),
        labels=[category_name(category) for category in held],
        colors=[CATEGORIES[category][0] for category in held],
        edgecolor="black",
        linewidth=0.4,
    )
    for category, layer in zip(held, layers, strict=True):
        layer.set_hatch(2 * CATEGORIES[category][1])
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
