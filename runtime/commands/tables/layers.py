"""Table of a run of a plan of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.common.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from planner.layers.plan.document import LayerPlan
    from runtime.layers.report import LayerRunReport


def run_table(plan: LayerPlan, found: LayerRunReport) -> Table:
    """Table of predicted beside measured figures, and of one process beside the ranks."""
    from rich.table import Table

    from runtime.measure.rounding import loss_error

    table = Table()
    for heading in ("", "predicted", "with the engine's own", "measured", "measured / predicted"):
        table.add_column(heading, justify="left" if not heading else "right")
    record = plan.record
    for rank, peak in enumerate(found.measured_peak_bytes):
        stage = plan.stage_of(rank)
        counted, engine = (peaks[stage : stage + 1] for peaks in _predicted_peaks(plan))
        table.add_row(
            f"peak of rank {rank} (stage {stage})",
            *(format_bytes(*predicted) if predicted else "-" for predicted in (counted, engine)),
            format_bytes(peak),
            ", ".join(f"{peak / predicted:.3f}" for predicted in (*counted, *engine)) or "-",
        )
    if found.measured_step_s is not None:
        step = None if record is None else record.objective_seconds
        table.add_row(
            "step",
            "-" if step is None else format_seconds(step),
            "",
            format_seconds(found.measured_step_s),
            "-" if not step else f"{found.measured_step_s / step:.3f}",
        )
    if found.step_range is not None:
        name, value = found.step_range
        table.add_row(name, "", "", value, "")
    if found.reference_loss is not None:
        table.add_section()
        table.add_row("", "one process", "", "ranks", "relative difference")
        for number, (loss, expected) in enumerate(zip(found.loss, found.reference_loss, strict=True), start=1):
            error = f"{loss_error(loss, expected):.1e}"
            table.add_row(f"loss of step {number}", f"{expected:.6f}", "", f"{loss:.6f}", error)
        within = f"<= {found.grad_tolerance:.0e}"
        table.add_row("gradients, worst tensor", "", "", within, f"{found.max_grad_rel_error:.1e}")
    return table


def _predicted_peaks(plan: LayerPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Predicted bytes by stage, as the formulation counts them and with the engine's own; empty where unknown."""
    record = plan.record
    return ((), ()) if record is None else (record.stage_peak_bytes, tuple(peak.nbytes for peak in record.engine_peaks))
