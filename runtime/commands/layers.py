"""What the commands ``plan``, ``run`` and ``explain`` do with plans of layers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.common.units import format_bytes, format_gap, format_seconds
from runtime.commands.progress import progress_line

if TYPE_CHECKING:
    from rich.table import Table

    from planner.layers.plan.document import LayerPlan, LayerSettings
    from planner.models.references import ModelReference
    from runtime.layers.report import LayerRunReport


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Options of ``plan`` that a plan of layers takes; as for :func:`planner.layer_planning.plan_layers`."""

    formulation: str
    cluster: str
    devices: int
    memory: int | None
    optimizer: str
    as_published: bool
    search_batch: bool


def plan_layers(reference: ModelReference, options: LayerOptions, time_limit: float, out: Path) -> None:
    """Plan by layers, write the plan and say what it is."""
    from planner import layer_planning
    from planner.layers.plan.document import save_layer_plan
    from runtime.layers.check import refusal

    with progress_line(f"planning {reference.source} by layers"):
        made = layer_planning.plan_layers(reference, time_limit=time_limit, **asdict(options))
        reason = refusal(made)
    save_layer_plan(made, out)
    typer.echo(layer_plan_text(made))
    if reason is not None:
        typer.echo(f"note: this plan cannot be run here: {reason}")
    typer.echo(f"wrote {out}")


def explain_layers(plan_file: Path) -> None:
    """Say what a plan of layers does."""
    from planner.layers.plan.document import load_layer_plan

    typer.echo(layer_plan_text(load_layer_plan(plan_file)))


def is_layer_plan(path: Path) -> bool:
    """Whether a file is a plan of layers; one that is no JSON is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "stages" in document


def run_layers(plan_file: Path, steps: int, check: bool, report: Path | None, data: Path | None, device: str) -> int:
    """Run a plan of layers on local processes and print what was predicted beside what was measured."""
    from rich.console import Console

    from planner.layers.plan.document import load_layer_plan
    from runtime.layers.launch import run_layer_plan
    from runtime.measure.run_report import write_report

    plan = load_layer_plan(plan_file)
    with progress_line(f"running {steps} steps on {plan.devices} ranks" + (" and on one process" if check else "")):
        found = run_layer_plan(plan, steps=steps, check=check, data=data, device=device)
    if report is not None:
        write_report(found, report)
    Console().print(run_table(plan, found))
    for failure in found.failures():
        Console(stderr=True).print(f"[red]{failure}[/red]")
    return found.exit_code


def run_table(plan: LayerPlan, found: LayerRunReport) -> Table:
    """What was predicted beside what was measured, and one process beside the ranks."""
    from rich.table import Table

    table = Table()
    for heading in ("", "predicted", "with the engine's own", "measured", "measured / predicted"):
        table.add_column(heading, justify="left" if not heading else "right")
    record = plan.record
    for rank, peak in enumerate(found.measured_peak_bytes):
        stage = rank // plan.stage_devices
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
    if found.reference_loss is not None:
        table.add_section()
        table.add_row("", "one process", "", "ranks", "relative difference")
        for number, (loss, expected) in enumerate(zip(found.loss, found.reference_loss, strict=True), start=1):
            error = abs(loss - expected) / (abs(expected) or 1.0)
            table.add_row(f"loss of step {number}", f"{expected:.6f}", "", f"{loss:.6f}", f"{error:.1e}")
        table.add_row("gradients, worst tensor", "", "", "", f"{found.max_grad_rel_error:.1e}")
    return table


def _predicted_peaks(plan: LayerPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Predicted bytes by stage, as the formulation counts them and with the engine's own; empty where unknown."""
    record = plan.record
    return ((), ()) if record is None else (record.stage_peak_bytes, tuple(peak.nbytes for peak in record.engine_peaks))


def layer_plan_text(plan: LayerPlan) -> str:
    """A plan of layers in words: what is promised, and how every run of equal layers is computed."""
    lines = []
    record = plan.record
    if record is not None:
        bound = "no bound" if record.bound_seconds is None else f"bound {format_seconds(record.bound_seconds)}"
        kind = "as published" if record.as_published else "exact"
        lines += [
            f"{record.formulation} ({kind}, {record.solver}): {record.status}, "
            f"step {format_seconds(record.objective_seconds)}, {bound}, gap {format_gap(record.gap)}, "
            f"found in {format_seconds(record.seconds)}",
            f"memory for tensors {format_bytes(record.tensor_bytes)}, predicted peaks by stage "
            + ", ".join(map(format_bytes, record.stage_peak_bytes)),
        ]
        for number, peak in enumerate(record.engine_peaks):
            held = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in peak.parts.items() if nbytes)
            lines.append(
                f"stage {number} with what torch's engine holds: {format_bytes(peak.nbytes)} at {peak.moment} ({held})"
            )
        if max((peak.nbytes for peak in record.engine_peaks), default=0) > record.tensor_bytes:
            lines.append("note: that is more than there is; plan with less memory or more devices")
    samples = f"batch {plan.model.batch}, {plan.micro_batches} micro-batches ({plan.schedule})"
    lines.append(f"{plan.devices} devices, {len(plan.stages)} stages, {samples}")
    for number, stage in enumerate(plan.stages):
        for words, layers in groupby(stage.layers, key=_words):
            names = [layer.name for layer in layers]
            shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} layers)"
            lines.append(f"stage {number}: {shown}: {words}")
    if record is not None:
        lines += [f"note: {note}" for note in record.notes]
    return "\n".join(lines)


def _words(layer: LayerSettings) -> str:
    """How a layer is computed, without its name."""
    words = []
    if layer.replicas > 1:
        words.append(f"{layer.replicas} replicas")
    if layer.shards > 1:
        words.append(f"{layer.sharding} over {layer.shards}")
    if layer.tensor_parallel > 1:
        words.append(f"tensor parallel {layer.tensor_parallel}")
    if layer.sequence_parallel:
        words.append("sequence parallel")
    if layer.slices > 1:
        sharded = layer.slices if layer.sharded_slices is None else layer.sharded_slices
        words.append(f"{layer.slices} slices, {sharded} sharded")
    if layer.checkpoint:
        words.append("checkpointed")
    words += [
        f"{what} offloaded"
        for what, offloaded in (
            ("hidden states", layer.offload_hidden),
            ("parameters", layer.offload_parameters),
            ("optimizer state", layer.offload_optimizer),
        )
        if offloaded
    ]
    return ", ".join(words) or "on one device"
