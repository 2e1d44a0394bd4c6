"""Explanation of a plan of layers: its settings, where its time and memory go, and the price of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from formulations.layers.layer import LayerProfile
from formulations.problem.solution import Progress
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.common.units import format_bytes, format_seconds
from planner.explanation import GIB, TOP, Explanation, Section
from planner.explore.layers import LayerExploration
from planner.explore.tables import seconds_of, signed_seconds
from planner.layers.plan.document import LayerPlan, LayerRecord, LayerSettings
from planner.layers.plan.memory import plan_profiles
from planner.layers.plan.rendering import stage_lines
from planner.machine.cluster import ClusterError, ClusterSpec
from planner.models.references import check_code

_Layer = tuple[LayerSettings, LayerProfile]


def explain_layers(
    plan: LayerPlan,
    cluster: ClusterSpec | str | None = None,
    time_limit: float = 20.0,
    allow_code: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Explanation:
    """Explain a plan of layers.

    Parameters
    ----------
    plan
        The plan; of one that was written by hand, which has no record, the settings alone.
    cluster
        The cluster where it is not known by the name in the plan.
    time_limit
        Seconds for each of the two searches that price memory.
    allow_code
        Whether a plan from elsewhere may import the module that it names.
    progress
        Called with every better incumbent or bound of these searches.

    Raises
    ------
    ValueError
        The plan's model is code that was not allowed, or its layers are not the model's.
    """
    settings = Section("Settings by stage", tuple(stage_lines(plan)))
    record = plan.record
    if record is None or plan.machine is None:
        return Explanation((settings,))
    check_code(plan.model.source, allow_code)
    here = LayerExploration.of_plan(plan, cluster, time_limit)
    layers = list(zip(plan.layers, plan_profiles(plan, here.chain), strict=True))
    return Explanation(
        (
            settings,
            _costliest(plan, layers),
            _held_otherwise(plan, layers),
            _fullest(plan, record),
            _price(plan, record, here, progress),
        )
    )


def _seconds(plan: LayerPlan, settings: LayerSettings, profile: LayerProfile) -> tuple[float, float]:
    """Seconds of forward and backward of a layer in a step on one device, communication left out."""
    samples = plan.model.batch / plan.micro_batches / settings.data_parallel
    part = profile.on_one_of(_degree(settings))
    forward = samples * part.forward_seconds + part.forward_fixed_seconds
    backward = samples * part.backward_seconds + part.backward_fixed_seconds
    return plan.micro_batches * forward, plan.micro_batches * backward


def _costliest(plan: LayerPlan, layers: Sequence[_Layer]) -> Section:
    """Most expensive kinds of equal layers with equal settings, by their computation on one device."""
    kinds: dict[tuple[LayerSettings, str], list[_Layer]] = {}
    for settings, profile in layers:
        kinds.setdefault((settings.model_copy(update={"name": ""}), profile.kind), []).append((settings, profile))
    rows = []
    for members in kinds.values():
        times = [_seconds(plan, *each) for each in members]
        again = sum(forward for (forward, _), (settings, _) in zip(times, members, strict=True) if settings.checkpoint)
        forward, backward = (sum(values) for values in zip(*times, strict=True))
        rows.append((forward + backward + again, forward, backward, again, [settings.name for settings, _ in members]))
    total = sum(row[0] for row in rows)
    lines = [f"{format_seconds(total)} of computation a step, all stages added up; communication is not in it"]
    for seconds, forward, backward, again, names in sorted(rows, key=lambda row: -row[0])[:TOP]:
        shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it"
        repeated = f", {format_seconds(again)} forward again" if again else ""
        lines.append(
            f"{format_seconds(seconds)}  {shown}: {format_seconds(forward)} forward, "
            f"{format_seconds(backward)} backward{repeated}"
        )
    return Section("Costliest layers", tuple(lines))


def _held_otherwise(plan: LayerPlan, layers: Sequence[_Layer]) -> Section:
    """Layers that run again in backward or whose tensors wait in host memory, with what a micro-batch saves by it."""
    lines = []
    for word, name in (
        ("recomputed", "checkpoint"),
        ("saved tensors in host memory", "offload_hidden"),
        ("parameters in host memory", "offload_parameters"),
    ):
        chosen = [(settings, profile) for settings, profile in layers if getattr(settings, name)]
        if not chosen:
            continue
        if name == "offload_parameters":
            saved = sum(profile.parameter_bytes // settings.shards for settings, profile in chosen)
        else:
            rows = plan.model.batch / plan.micro_batches
            saved = int(
                sum(
                    rows / settings.data_parallel * profile.on_one_of(_degree(settings)).saved_bytes
                    for settings, profile in chosen
                )
            )
        lines.append(f"{len(chosen)} layers {word}: {format_bytes(saved)} less on a device, {chosen[0][0].name} first")
    return Section("Recomputed and offloaded", tuple(lines) or ("nothing: every layer keeps what backward reads",))


def _degree(settings: LayerSettings) -> int:
    return 1 if settings.undivided else settings.tensor_parallel


def _fullest(plan: LayerPlan, record: LayerRecord) -> Section:
    """What each stage holds at its peak, as the formulation counts it and with what torch's engine holds."""
    lines = [f"{format_bytes(record.tensor_bytes)} for tensors on a device"]
    for number, counted in enumerate(record.stage_peak_bytes):
        lines.append(f"stage {number}: {format_bytes(counted)} as {record.formulation} counts")
        if number < len(record.engine_peaks):
            peak = record.engine_peaks[number]
            parts = sorted(peak.parts.items(), key=lambda part: -part[1])
            held = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts if nbytes)
            lines.append(f"stage {number}: {format_bytes(peak.nbytes)} at {peak.moment}: {held}")
    return Section("Memory at the peak", tuple(lines))


def _price(
    plan: LayerPlan, record: LayerRecord, here: LayerExploration, progress: Callable[[Progress], None] | None
) -> Section:
    """Search again with one GiB less and one GiB more, or half of what tensors may hold where that is less."""
    device = here.question.cluster.device
    present = record.tensor_bytes + device.reserve_bytes
    change = min(GIB, record.tensor_bytes // 2)
    lines = []
    for word, memory in (("less", present - change), ("more", present + change)):
        if memory > device.memory_bytes:
            lines.append(f"{format_bytes(change)} {word}: the device has no more")
            continue
        if memory < present and max(record.stage_peak_bytes) + device.reserve_bytes <= memory:
            lines.append(f"{format_bytes(change)} less: nothing, because this plan fits into that too")
            continue
        try:
            found = here.within(memory, record.pins, progress)
        except (InfeasibleError, ClusterError, PlanError) as error:
            lines.append(f"{format_bytes(change)} {word}: {error}")
            continue
        seconds = seconds_of(found)
        if word == "more" and record.choices.get("objective") != "peak":
            seconds = min(seconds, record.objective_seconds)
        bound = "" if found.bound_seconds is None else f", bound {format_seconds(found.bound_seconds)}"
        lines.append(
            f"{format_bytes(change)} {word}: {signed_seconds(seconds - record.objective_seconds)} a step "
            f"({format_seconds(seconds)}{bound})"
        )
    return Section("Price of memory", tuple(lines))
