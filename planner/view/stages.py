"""Chart of a plan of layers: bytes on one device of every stage by purpose, with the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from planner.common.units import axis_unit, format_bytes
from planner.layers.plan.document import EnginePeak, LayerPlan, LayerRecord
from planner.replay.report import Category
from planner.view.charts import FAR_LIMIT, chart_layout, chart_legend
from planner.view.styles import CATEGORIES, Style

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PURPOSES: Mapping[str, Style] = {
    "states": CATEGORIES[Category.PARAMETERS],
    "activations": CATEGORIES[Category.ACTIVATIONS],
    "workspace": CATEGORIES[Category.WORKSPACE],
    "copies": CATEGORIES[Category.RESHARDED],
    "gradients": CATEGORIES[Category.GRADIENTS],
    "reduction": CATEGORIES[Category.OPTIMIZER],
    "pipeline": CATEGORIES[Category.MODULE_BUFFERS],
}
"""Purposes of :class:`planner.layers.plan.document.EnginePeak`."""
COUNTED = "by the formulation"


def stages_figure(plan: LayerPlan, together: Sequence[LayerPlan] = ()) -> Figure | None:
    """Bytes on one device of every stage at its peak, by purpose where torch's engine was predicted.

    Parameters
    ----------
    plan
        The plan.
    together
        Plans that are shown side by side: their figures have the same axes.

    Returns
    -------
    Figure or None
        Bytes for every stage in a unit that the highest fills, with the limit and with what the formulation itself
        counts; None for a plan without a prediction.
    """
    from plotly.graph_objects import Bar, Figure, Scatter

    record = plan.record
    if record is None or not record.stage_peak_bytes:
        return None
    records = [other.record for other in (together or (plan,)) if other.record is not None]
    highest = max(map(_highest, records))
    unit, size = axis_unit(highest)
    figure = Figure()
    stages = [f"stage {number}" for number in range(len(record.stage_peak_bytes))]
    for purpose, (colour, pattern) in PURPOSES.items():
        if any(peak.parts[purpose] for other in records for peak in other.engine_peaks):
            parts = [peak.parts[purpose] for peak in record.engine_peaks]
            figure.add_trace(
                Bar(
                    orientation="h",
                    y=stages[: len(parts)],
                    x=[nbytes / size for nbytes in parts],
                    name=purpose,
                    marker={
                        "color": colour,
                        "line": {"color": "black", "width": 0.6},
                        "pattern": {"shape": pattern, "fgcolor": "black", "size": 6, "solidity": 0.2},
                    },
                    customdata=[
                        f"{format_bytes(nbytes)} of {format_bytes(peak.nbytes)} at {_escaped(peak)}"
                        for nbytes, peak in zip(parts, record.engine_peaks, strict=True)
                    ],
                    hovertemplate="%{y}, " + purpose + ": %{customdata}<extra></extra>",
                )
            )
    figure.add_trace(
        Scatter(
            mode="markers",
            y=stages,
            x=[nbytes / size for nbytes in record.stage_peak_bytes],
            name=COUNTED,
            marker={"symbol": "diamond", "size": 11, "color": "white", "line": {"color": "black", "width": 2}},
            customdata=[format_bytes(nbytes) for nbytes in record.stage_peak_bytes],
            hovertemplate="%{y}, " + COUNTED + ": %{customdata}<extra></extra>",
        )
    )
    for number, peak in enumerate(record.engine_peaks):
        figure.add_annotation(
            x=max(peak.nbytes, record.stage_peak_bytes[number]) / size,
            y=stages[number],
            text=f"{format_bytes(peak.nbytes)} in all",
            showarrow=False,
            xanchor="left",
            xshift=10,
        )
    limits = [other.tensor_bytes / size for other in records if other.tensor_bytes <= FAR_LIMIT * highest]
    limit = record.tensor_bytes / size
    if limit in limits:
        figure.add_vline(
            x=limit,
            line={"dash": "dash", "color": "black", "width": 1.5},
            name=f"limit {format_bytes(record.tensor_bytes)}",
            showlegend=True,
        )
    most = max(len(other.stage_peak_bytes) for other in records)
    figure.update_xaxes(title_text=f"one device at its peak ({unit})")
    figure.update_xaxes(range=[0, 1.25 * max([highest / size, *limits])])
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=[f"stage {number}" for number in range(most)][::-1],
        range=[-0.6, most - 0.4],
    )
    figure.update_layout(**chart_layout(210 + 34 * most), barmode="stack", legend=chart_legend(above=False))
    return figure


def _highest(record: LayerRecord) -> int:
    return max(*record.stage_peak_bytes, *(peak.nbytes for peak in record.engine_peaks), 1)


def _escaped(peak: EnginePeak) -> str:
    from html import escape

    return escape(peak.moment)  # a layer's name, and plotly reads some tags of HTML
