"""OSDP on a real model: the mode of every attention and feed-forward module, as a layer plan.

A layer is an operator of the paper: the embedding, the attention or the feed-forward module of a block with the norm in
front of it, or the head. The depth-first search decides as published, within its time, and the knapsack exactly; both
on one problem, whose count of memory and strategies are choices (:mod:`planner.layers.plan.choices`). Checkpointing is
of all operators or none, as in the paper. Only matrix products are cut; embedding tables, for example, are not.
"""

from __future__ import annotations

from dataclasses import replace

from formulations.layers.layer import LayerChain
from formulations.osdp.problem import (
    ANY_SLICES,
    PUBLISHED_SLICES,
    Accounting,
    OsdpMachine,
    OsdpSettings,
    Slicing,
)
from formulations.osdp.scheduler import SECONDS_PER_QUANTUM, Allows, Method, OsdpPlan, least_bytes, plan_osdp
from formulations.problem.solution import Status, relative_gap
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.common.units import format_bytes
from planner.layers.plan.document import LayerPlan, LayerRecord, LayerSettings, StagePlan
from planner.layers.plan.request import LayerRequest
from planner.machine.cluster import ClusterSpec
from planner.models.references import planned_model

TENSORS_AT_WORK = 2
"""Tensors of a running module under FSDP2, sharded or replicated: its parameters and, in backward, their gradients."""


def plan_with_osdp(request: LayerRequest, chain: LayerChain) -> LayerPlan:
    """Choose for every operator whether it is replicated or sharded, in how many slices, and whether all run again.

    Parameters
    ----------
    request
        The request.
    chain
        Layers of its model, attention and feed-forward modules apart.

    Raises
    ------
    PlanError
        The devices cannot share the batch equally.
    InfeasibleError
        No choice fits the memory.
    """
    kinds = [settings for settings in settings_of(request) if not _without_mode(request, chain, settings)]
    if not kinds:
        stuck = _without_mode(request, chain, settings_of(request)[-1])
        raise request.refusal(stuck)
    plans = {settings: _planned(request, chain, settings, request.time_limit / len(kinds)) for settings in kinds}
    found, settings = _best(plans)
    if found.objective is None:
        machine = _machine(request)
        least = min(
            least_bytes(chain, machine, settings, _least_batch(request), _allows(request, settings))
            for settings in kinds
        )
        raise InfeasibleError(
            f"memory for tensors {format_bytes(request.tensor_bytes)} on {request.devices} devices: OSDP finds no "
            f"modes that fit ({found.status}), the smallest ones need {format_bytes(least)}; use more devices, more "
            "memory or a smaller batch"
        )
    layers = tuple(_settings(name, mode, request.devices, settings.checkpointing) for name, mode in found.modes.items())
    return LayerPlan(
        model=planned_model(request.reference, request.devices * found.batch),
        devices=request.devices,
        stages=(StagePlan(layers=layers),),
        optimizer=request.optimizer.name,
        seed=request.reference.seed,
        record=_record(request, found, chain),
    )


def settings_of(request: LayerRequest) -> list[OsdpSettings]:
    """Settings of the problem, which both searches read; two where checkpointing is a choice."""
    every = request.choices["strategies"] == "all"
    kept = OsdpSettings(
        slices=ANY_SLICES if every else PUBLISHED_SLICES,
        state_multiple=request.states_per_parameter,
        products_only=True,
    )
    if request.choices["memory_model"] == "engine":
        kept = replace(
            kept, accounting=Accounting.PEAK, gathered_tensors=TENSORS_AT_WORK, replica_tensors=TENSORS_AT_WORK
        )
    return [kept, replace(kept, checkpointing=True)] if every else [kept]


def _planned(request: LayerRequest, chain: LayerChain, settings: OsdpSettings, time_limit: float) -> OsdpPlan:
    return plan_osdp(
        chain,
        _machine(request),
        settings,
        Method.DFS if request.as_published else Method.KNAPSACK,
        batch=None if request.search_batch else _batch_per_device(request),
        time_limit=time_limit,
        allows=_allows(request, settings),
    )


def _allows(request: LayerRequest, settings: OsdpSettings) -> Allows | None:
    """What the request's pins leave to an operator."""
    if not request.is_restricted:
        return None
    return lambda name, mode: request.allows(_settings(name, mode, request.devices, settings.checkpointing))


def _without_mode(request: LayerRequest, chain: LayerChain, settings: OsdpSettings) -> str:
    """The first operator to which the pins leave no mode; empty where all have one."""
    allows = _allows(request, settings)
    if allows is None:
        return ""
    stuck = (layer.name for layer in chain.layers if not any(allows(layer.name, m) for m in settings.modes(layer)))
    return next(stuck, "")


def _best(plans: dict[OsdpSettings, OsdpPlan]) -> tuple[OsdpPlan, OsdpSettings]:
    """The best plan under any settings, with a bound for all of them, and its settings; any plan where none fits."""
    fitting = [(plan.objective, settings) for settings, plan in plans.items() if plan.objective is not None]
    settings = min(fitting, key=lambda entry: entry[0])[1] if fitting else next(iter(plans))
    best = plans[settings]
    if best.bound is None:
        return best, settings
    bound = min(plan.bound for plan in plans.values() if plan.bound is not None)
    status = Status.OPTIMAL if best.objective == bound else Status.FEASIBLE
    seconds = sum(plan.seconds for plan in plans.values())
    gap = relative_gap(best.objective, bound)
    return replace(best, status=status, bound=bound, gap=gap, seconds=seconds), settings


def _machine(request: LayerRequest) -> OsdpMachine:
    return data_parallel_machine(request.cluster, request.devices, request.tensor_bytes)


def data_parallel_machine(cluster: ClusterSpec, devices: int, tensor_bytes: int) -> OsdpMachine:
    """Alpha and beta of one ring over devices of a cluster.

    Parameters
    ----------
    cluster
        Where the ring's link comes from.
    devices
        How many share the data.
    tensor_bytes
        Limit of tensors on one device, in bytes.
    """
    (link,) = cluster.mesh_links((devices,))
    return OsdpMachine(devices, link.latency_seconds, 1 / link.bandwidth, tensor_bytes)


def _least_batch(request: LayerRequest) -> int:
    return 1 if request.search_batch else _batch_per_device(request)


def _batch_per_device(request: LayerRequest) -> int:
    batch, rest = divmod(request.reference.batch, request.devices)
    if rest:
        multiple = -(-request.reference.batch // request.devices) * request.devices
        raise PlanError(
            f"batch {request.reference.batch} on {request.devices} devices: OSDP gives all of them as many samples; "
            f"use {multiple}"
        )
    return batch


def _settings(name: str, mode: Slicing, devices: int, checkpointed: bool) -> LayerSettings:
    return LayerSettings(
        name=name,
        data_parallel=devices,
        sharding="zero3" if mode.sharded else "none",
        checkpoint=checkpointed,
        slices=mode.slices,
        sharded_slices=mode.sharded if 0 < mode.sharded < mode.slices else None,
    )


def _record(request: LayerRequest, found: OsdpPlan, chain: LayerChain) -> LayerRecord:
    assert found.objective is not None
    seconds_per_quantum = SECONDS_PER_QUANTUM * found.batch
    return LayerRecord(
        formulation=request.formulation,
        as_published=request.as_published,
        solver=found.solver,
        status=found.status,
        objective_seconds=found.objective * seconds_per_quantum,
        bound_seconds=None if found.bound is None else found.bound * seconds_per_quantum,
        gap=found.gap,
        seconds=found.seconds,
        stage_peak_bytes=(found.memory_bytes,),
        tensor_bytes=request.tensor_bytes,
        notes=chain.notes,
        choices=request.choices,
        pins=request.pins,
    )
