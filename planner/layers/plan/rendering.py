"""A plan of layers as text."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from planner.common.units import format_bytes, format_gap, format_limit, format_seconds

if TYPE_CHECKING:
    from planner.layers.plan.document import LayerPlan, LayerSettings, StagePlan


def layer_plan_text(plan: LayerPlan) -> str:
    """Lines of text about a plan of layers: its prediction, then the settings of every run of equal layers."""
    lines = []
    record = plan.record
    if record is not None:
        known = record.bound_seconds
        bound = "no bound" if known is None else f"bound {format_seconds(known)} (exact)"
        if record.bound_bytes is not None:
            bound = f"peak bound {format_bytes(record.bound_bytes)} (exact)"
        kind = "as published" if record.as_published else "exact"
        lines += [
            f"{record.formulation} ({kind}, {record.solver}): {record.status}, "
            f"step {format_seconds(record.objective_seconds)}, {bound}, gap {format_gap(record.gap)}, "
            f"found in {format_seconds(record.seconds)}",
            f"memory {format_limit(record.tensor_bytes, record.reserve_bytes)}; predicted peaks by stage "
            + ", ".join(map(format_bytes, record.stage_peak_bytes)),
        ]
        if record.choices:
            kept = f"; slips kept: {', '.join(record.slips)}" if record.slips else ""
            named = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in record.choices.items())
            lines.append(f"problem: {named}{kept}")
        lines += [f"pinned: {pin}" for pin in record.pins]
        for number, peak in enumerate(record.engine_peaks):
            held = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in peak.parts.items() if nbytes)
            lines.append(
                f"stage {number} with what torch's engine holds: {format_bytes(peak.nbytes)} at {peak.moment} ({held})"
            )
        if max((peak.nbytes for peak in record.engine_peaks), default=0) > record.tensor_bytes:
            lines.append("note: that is more than there is; plan with less memory or more devices")
    samples = f"batch {plan.model.batch}, {plan.micro_batches} micro-batches ({plan.schedule})"
    lines.append(f"{plan.devices} devices, {len(plan.stages)} stages, {samples}")
    lines += stage_lines(plan)
    if record is not None:
        lines += [f"note: {note}" for note in record.notes]
    return "\n".join(lines)


def stage_lines(plan: LayerPlan) -> list[str]:
    """A line for every run of layers of a stage with equal settings."""
    lines = []
    for number, stage in enumerate(plan.stages):
        lines += [f"stage {number}: {shown}: {settings}" for shown, settings in layer_runs(stage)]
    return lines


def layer_runs(stage: StagePlan) -> list[tuple[str, str]]:
    """Names of every run of equal layers of a stage, and their settings."""
    found = []
    for settings, layers in groupby(stage.layers, key=_settings_text):
        names = [layer.name for layer in layers]
        shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} layers)"
        found.append((shown, settings))
    return found


def _settings_text(layer: LayerSettings) -> str:
    """Settings of a layer as text, without its name."""
    parts = []
    if layer.replicas > 1:
        parts.append(f"{layer.replicas} replicas")
    if layer.shards > 1:
        parts.append(f"{layer.sharding} over {layer.shards}")
    if layer.tensor_parallel > 1:
        parts.append(f"tensor parallel {layer.tensor_parallel}")
    if layer.sequence_parallel:
        parts.append("sequence parallel")
    if layer.slices > 1:
        sharded = layer.slices if layer.sharded_slices is None else layer.sharded_slices
        parts.append(f"{layer.slices} slices, {sharded} sharded")
    if layer.checkpoint:
        parts.append("checkpointed")
    parts += [
        f"{what} offloaded"
        for what, offloaded in (
            ("hidden states", layer.offload_hidden),
            ("parameters", layer.offload_parameters),
            ("optimizer state", layer.offload_optimizer),
        )
        if offloaded
    ]
    return ", ".join(parts) or "on one device"
