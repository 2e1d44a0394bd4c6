"""Plans of whole layers: a model, a cluster and a memory limit become a layer plan with its certificate.

The formulations decide on layers (:mod:`formulations.layers.layer`), each either by the search of its paper, as
published, or exactly. The result is a :class:`~planner.layers.plan.document.LayerPlan`, which the layer executor runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from formulations.layers.layer import LayerChain
from formulations.problem.solution import Progress
from formulations.problem.time_limit import interruptible, was_interrupted
from planner.common.plan_error import PlanError
from planner.graph.optimizers import default_optimizer, optimizer_named
from planner.layers.plan.check import divisors
from planner.layers.plan.document import LayerPlan, LayerSettings, PlannedMachine
from planner.layers.plan.memory import engine_peaks, plan_profiles
from planner.layers.plan.pins import layer_pin
from planner.layers.plan.request import LayerRequest
from planner.layers.profiles.files import profiled_layers
from planner.layers.profiles.folding import model_layers
from planner.machine.cluster import ClusterSpec, load_cluster
from planner.machine.memory_budget import MemoryBudget
from planner.models.references import ModelReference
from planner.papers.capture.adapter import plan_with_capture
from planner.papers.galvatron.adapter import plan_with_galvatron
from planner.papers.h3t.adapter import plan_with_h3t
from planner.papers.osdp.adapter import plan_with_osdp
from planner.plan.notes import INTERRUPTED

_OF_OPERATORS = frozenset({"osdp"})
"""Formulations whose layers are attention and feed-forward modules rather than blocks."""

Planner = Callable[[LayerRequest, LayerChain], LayerPlan]

LAYER_FORMULATIONS: dict[str, Planner] = {
    "osdp": plan_with_osdp,
    "galvatron": plan_with_galvatron,
    "h3t": plan_with_h3t,
    "capture": plan_with_capture,
}
"""Formulations over whole layers, by the names that users give."""

_WIDE_GRADIENTS = (
    "gradients are summed over devices in float32; the engine's peak counts that, while the seconds and the memory of "
    "the paper's model count the parameters' dtype (--reduce-dtype same sums them in it)"
)


def plan_layers(
    reference: ModelReference | str,
    *,
    cluster: ClusterSpec | str,
    devices: int,
    formulation: str,
    memory: int | None = None,
    optimizer: str | None = None,
    as_published: bool = False,
    search_batch: bool = False,
    time_limit: float = 30.0,
    slips: str | None = None,
    pins: Sequence[tuple[str, str]] = (),
    forbidden: Sequence[tuple[str, str]] = (),
    chain: LayerChain | None = None,
    settings: Mapping[str, LayerSettings] | None = None,
    choices: Mapping[str, str | None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> LayerPlan:
    """Plan a training step by layers.

    Parameters
    ----------
    reference
        Which step; a name alone stands for a reference with the defaults of :class:`ModelReference`. ``layers:FILE``
        is a profile file (:mod:`planner.layers.profiles.files`), of which there is a plan, but nothing to run.
    cluster
        A cluster, or the name or file of one.
    devices
        How many of its devices train.
    formulation
        A key of :data:`LAYER_FORMULATIONS`.
    memory
        Bytes of one device, of which the cluster's reserve is subtracted; all that it has if None.
    optimizer
        A name of :data:`planner.graph.optimizers.OPTIMIZERS`; AdamW, in 32 bits for parameters of 16, if None.
    as_published
        Whether the paper's own search decides, in place of the exact one.
    search_batch
        Whether the batch is decided too; that of the reference is kept otherwise.
    time_limit
        Seconds for a search without a short bound on its time.
    slips
        Slips that the paper's own search keeps; those that its text does not contradict if None.
    pins, forbidden
        What the plan has to decide of layers, and what it must not: targets and decisions, as for
        :func:`planner.layers.plan.pins.layer_pin`.
    chain
        The layers as :func:`layers_of` returns them; found here if None.
    settings
        Settings of every layer by its name, where stages and micro-batches alone are to be decided.
    choices
        Choices of the problem that are not the paper's (:data:`planner.layers.plan.choices.CHOICES`).

    progress
        Called with every better incumbent or bound of a search that may take long, in nanoseconds a step.

    Raises
    ------
    PlanError
        Unknown formulation or choice, or a number of devices that it cannot use.
    InfeasibleError
        Nothing fits, or nothing was found.
    """
    if formulation not in LAYER_FORMULATIONS:
        raise PlanError(f"formulation {formulation!r} plans no layers; choose one of {', '.join(LAYER_FORMULATIONS)}")
    found = load_cluster(cluster) if isinstance(cluster, str) else cluster
    step = ModelReference(reference) if isinstance(reference, str) else reference
    if devices < 1 or (not found.is_shared and found.devices % devices):
        raise PlanError(
            f"{devices} of the {found.devices} devices of cluster {found.name}: use a number that divides these, "
            f"{', '.join(map(str, divisors(found.devices)))}"
        )
    budget = MemoryBudget.on(found, memory)
    request = LayerRequest(
        formulation=formulation,
        reference=step,
        cluster=found,
        devices=devices,
        tensor_bytes=budget.tensor_bytes,
        optimizer=optimizer_named(optimizer or default_optimizer(step.dtype)),
        as_published=as_published,
        search_batch=search_batch,
        time_limit=time_limit,
        given={name: value for name, value in (choices or {}).items() if value is not None},
        slips=slips,
        progress=progress,
    )
    _check_choices(request)
    chain = chain or layers_of(step, found, formulation)
    names = [layer.name for layer in chain.layers]
    wanted = [layer_pin(target, decision, names) for target, decision in pins]
    unwanted = [layer_pin(target, decision, names, forbids=True) for target, decision in forbidden]
    request = replace(request, pins=tuple(dict.fromkeys((*wanted, *unwanted))), settings=settings)
    with interruptible():
        made = LAYER_FORMULATIONS[formulation](request, chain)
        interrupted = was_interrupted()
    record = made.record
    assert record is not None
    machine = PlannedMachine(
        cluster=found.name,
        device=found.device_kind,
        calibration=found.measured.fingerprint() if found.measured else None,
    )
    made = made.model_copy(update={"machine": machine})
    notes = record.notes
    if made.model.reduce_dtype == "float32":
        notes = (*notes, _WIDE_GRADIENTS)
    if interrupted:
        notes = (INTERRUPTED, *notes)
    peaks = engine_peaks(made, plan_profiles(made, chain))
    known = {"engine_peaks": peaks, "notes": notes, "reserve_bytes": budget.reserve_bytes}
    return made.model_copy(update={"record": record.model_copy(update=known)})


def layers_of(reference: ModelReference, cluster: ClusterSpec, formulation: str) -> LayerChain:
    """Layers of a step with their costs on a cluster, as a formulation divides the step into layers."""
    return profiled_layers(reference) or model_layers(reference, cluster, apart=formulation in _OF_OPERATORS)


def _check_choices(request: LayerRequest) -> None:
    """Refuse choices that a formulation does not have, before its layers are traced."""
    choices = request.choices
    if request.slips is not None and not request.as_published:
        raise PlanError(f"slips {request.slips}: the exact search keeps none; ask for the plan as published")
    if request.slips is not None and request.formulation == "osdp":
        raise PlanError(f"slips {request.slips}: osdp has none; leave them out")
    if request.as_published and choices.get("objective") == "time":
        raise PlanError(
            "objective time: Algorithm 4 looks for the least peak; ask for objective peak, or leave out as published"
        )
