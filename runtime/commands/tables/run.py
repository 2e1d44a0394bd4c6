"""The table of a run: predicted beside measured figures."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from planner.common.units import format_bytes, format_gap, format_seconds
from planner.plan.document import Plan
from runtime.measure.rounding import loss_error
from runtime.measure.run_report import RunReport


def run_table(plan: Plan, report: RunReport) -> Table:
    """Status, bound and gap, then predicted and measured per rank, then the loss beside one process.

    Parameters
    ----------
    plan
        The plan that was run.
    report
        Report of the run.
    """
    options = plan.decision.options
    title = f"{plan.decision.model.source} on {'x'.join(map(str, options.mesh))} ranks, {report.steps} steps"
    table = Table(title=title, title_justify="left")
    for heading in ("", "predicted", "measured", "measured / predicted"):
        table.add_column(heading, justify="left" if not heading else "right")
    bound = "-" if plan.bound_seconds is None else format_seconds(plan.bound_seconds)
    table.add_row("status", str(plan.record.certificate.status), "", "")
    proof = plan.record.certificate.proof
    known = "" if proof is None else f" ({proof})"
    table.add_row("bound, gap", f"{bound}{known}, {format_gap(plan.gap)}", "", "")
    if report.memory_limit_bytes is not None:
        table.add_row("memory limit", format_bytes(report.memory_limit_bytes), _of_the_limit(report), "")
    for rank, (predicted, measured) in enumerate(
        zip(report.predicted_peak_bytes, report.measured_peak_bytes, strict=True)
    ):
        table.add_row(
            f"peak of rank {rank}", format_bytes(predicted), format_bytes(measured), _ratio(measured, predicted)
        )
    for rank, (predicted, measured) in enumerate(
        zip(report.predicted_host_peak_bytes, report.measured_host_peak_bytes, strict=True)
    ):
        if predicted or measured:
            table.add_row(f"peak host memory of rank {rank}", format_bytes(predicted), format_bytes(measured), "")
    reserved, retries = report.reserved_peak_bytes or [], report.allocation_retries or []
    for rank, (held, again) in enumerate(zip(reserved, retries, strict=True)):
        kept = format_bytes(held - report.measured_peak_bytes[rank])
        table.add_row(f"allocator of rank {rank}", "", format_bytes(held), f"{kept} beside tensors, {again} retries")
    step = report.measured_step_s
    table.add_row(
        "step",
        format_seconds(report.predicted_step_s),
        "-" if step is None else format_seconds(step),
        "-" if step is None else _ratio(step, report.predicted_step_s),
    )
    if report.step_range is not None:
        name, value = report.step_range
        table.add_row(name, "", value, "")
    if any(report.predicted_host_peak_bytes):
        table.add_row("waiting for host copies, in a step", format_seconds(report.predicted_stall_s), "-", "")
    table.add_section()
    table.add_row("", "one process", "ranks", "relative difference")
    references: Sequence[float | None] = report.reference_loss or [None] * report.steps
    for number, (loss, reference) in enumerate(zip(report.loss, references, strict=True), start=1):
        if reference is None:
            table.add_row(f"loss of step {number}", "-", f"{loss:.6f}", "-")
        else:
            difference = f"{loss_error(loss, reference):.1e}"
            table.add_row(f"loss of step {number}", f"{reference:.6f}", f"{loss:.6f}", difference)
    if report.max_grad_rel_error is not None:
        within = f"<= {report.grad_tolerance:.0e}"
        table.add_row("gradients, worst tensor", "", within, f"{report.max_grad_rel_error:.1e}")
    return table


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.3f}" if predicted else "-"


def _of_the_limit(report: RunReport) -> str:
    """Whether a run kept its memory limit."""
    if not report.excess_bytes:
        return "kept"
    above = format_bytes(report.excess_bytes)
    return f"exceeded by {above}" if report.exceeds_limit else f"kept but for {above}, in the reserve"
