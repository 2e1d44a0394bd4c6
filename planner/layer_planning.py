"""Plans of whole layers: a model, a cluster and a memory limit become a layer plan with its certificate.

The formulations decide on layers (:mod:`formulations.layers`), each either by the search of its paper, as published,
or exactly. What they decide is written down as a :class:`~planner.layer_plan.LayerPlan`, which the layer executor runs.
"""

from __future__ import annotations

from collections.abc import Callable

from formulations.layers import LayerChain
from planner.cluster import ClusterSpec, load_cluster
from planner.infeasibility import InfeasibleError
from planner.layer_capture import plan_with_capture
from planner.layer_files import profiled_layers
from planner.layer_folding import model_layers
from planner.layer_galvatron import plan_with_galvatron
from planner.layer_h3t import plan_with_h3t
from planner.layer_osdp import plan_with_osdp
from planner.layer_plan import LayerPlan
from planner.layer_plan_check import divisors
from planner.layer_plan_memory import engine_peaks, plan_profiles
from planner.layer_request import LayerRequest
from planner.models import ModelReference
from planner.optimizers import optimizer_named
from planner.plan_error import PlanError
from planner.units import format_bytes

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


def plan_layers(
    reference: ModelReference | str,
    *,
    cluster: ClusterSpec | str,
    devices: int,
    formulation: str,
    memory: int | None = None,
    optimizer: str = "adamw",
    as_published: bool = False,
    search_batch: bool = False,
    time_limit: float = 30.0,
) -> LayerPlan:
    """Plan a training step by layers.

    Parameters
    ----------
    reference
        Which step; a name alone stands for a reference with the defaults of :class:`ModelReference`. ``layers:FILE``
        is a profile file (:mod:`planner.layer_files`), of which there is a plan, but nothing to run.
    cluster
        A cluster, or the name or file of one.
    devices
        How many of its devices train.
    formulation
        A key of :data:`LAYER_FORMULATIONS`.
    memory
        Bytes of one device, of which the cluster's reserve is subtracted; all that it has if None.
    optimizer
        A name of :data:`planner.optimizers.OPTIMIZERS`.
    as_published
        Whether the paper's own search decides, in place of the exact one.
    search_batch
        Whether the batch is decided too; that of the reference is kept otherwise.
    time_limit
        Seconds for a search that may take long.

    Raises
    ------
    PlanError
        Unknown formulation, or a number of devices that it cannot use.
    InfeasibleError
        Nothing fits, or nothing was found.
    """
    if formulation not in LAYER_FORMULATIONS:
        raise PlanError(f"formulation {formulation!r} plans no layers; choose one of {', '.join(LAYER_FORMULATIONS)}")
    found = load_cluster(cluster) if isinstance(cluster, str) else cluster
    step = ModelReference(reference) if isinstance(reference, str) else reference
    if devices < 1 or (found.measured is None and found.devices % devices):
        raise PlanError(
            f"{devices} of the {found.devices} devices of cluster {found.name}: use a number that divides these, "
            f"{', '.join(map(str, divisors(found.devices)))}"
        )
    whole = found.device.memory_bytes if memory is None else memory
    if whole <= found.device.reserve_bytes:
        raise InfeasibleError(
            f"memory {format_bytes(whole)}: the cluster reserves {format_bytes(found.device.reserve_bytes)} of it, "
            "which leaves nothing for tensors; give more than the reserve"
        )
    request = LayerRequest(
        formulation=formulation,
        reference=step,
        cluster=found,
        devices=devices,
        tensor_bytes=whole - found.device.reserve_bytes,
        optimizer=optimizer_named(optimizer),
        as_published=as_published,
        search_batch=search_batch,
        time_limit=time_limit,
    )
    chain = profiled_layers(step) or model_layers(step, found, apart=formulation in _OF_OPERATORS)
    made = LAYER_FORMULATIONS[formulation](request, chain)
    assert made.record is not None
    peaks = engine_peaks(made, plan_profiles(made, chain))
    return made.model_copy(update={"record": made.record.model_copy(update={"engine_peaks": peaks})})
