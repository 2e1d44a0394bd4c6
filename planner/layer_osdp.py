"""OSDP on a real model: which blocks are sharded, as a layer plan.

A layer is a block of the model, its attention and MLP together, between embedding and head. As published, memory is the
sum of equation (1) and the depth-first search decides within its time; else the knapsack decides, and memory is that
of the worst block, with its gathered parameters and their gradient, as torch's FSDP2 has them.
"""

from __future__ import annotations

from dataclasses import replace

from formulations.layers import LayerChain
from formulations.models.osdp import (
    SECONDS_PER_COST,
    Accounting,
    OsdpMachine,
    OsdpSettings,
    Slicing,
    operator_tables,
    step_cost,
)
from formulations.searches.osdp_plan import SECONDS_PER_QUANTUM, Method, OsdpPlan, bytes_of, per_sample, plan_osdp
from formulations.solution import Status, relative_gap
from planner.cluster import ClusterSpec
from planner.infeasibility import InfeasibleError
from planner.layer_plan import LayerPlan, LayerRecord, LayerSettings, StagePlan
from planner.layer_request import LayerRequest, planned_model
from planner.plan_error import PlanError
from planner.units import format_bytes

GATHERED_TENSORS = 2
"""A block's whole parameters and, in backward, their whole gradient."""


def plan_with_osdp(request: LayerRequest, chain: LayerChain) -> LayerPlan:
    """Choose for every layer whether it is replicated or sharded.

    Raises
    ------
    PlanError
        The devices cannot share the batch equally.
    InfeasibleError
        No choice fits the memory.
    """
    settings = OsdpSettings(
        accounting=Accounting.PUBLISHED if request.as_published else Accounting.PEAK,
        state_multiple=request.states_per_parameter,
        gathered_tensors=GATHERED_TENSORS,
    )
    method = Method.DFS if request.as_published else Method.KNAPSACK
    machine = data_parallel_machine(request.cluster, request.devices, request.tensor_bytes)
    found = plan_osdp(
        chain,
        machine,
        settings,
        method,
        batch=None if request.search_batch else _batch_per_device(request),
        time_limit=request.time_limit,
    )
    if found.objective is not None:
        found = _tied_alike(chain, machine, settings, found)
    if found.objective is None or found.memory_bytes > request.tensor_bytes:
        raise InfeasibleError(
            f"memory for tensors {format_bytes(request.tensor_bytes)} on {request.devices} devices: OSDP finds no "
            f"modes that fit ({found.status}); use more devices, more memory or a smaller batch"
        )
    layers = tuple(_settings(name, mode, request.devices) for name, mode in found.modes.items())
    return LayerPlan(
        model=planned_model(request.reference, request.devices * found.batch),
        devices=request.devices,
        stages=(StagePlan(layers=layers),),
        optimizer=request.optimizer.name,
        seed=request.reference.seed,
        record=_record(request, found, chain),
    )


def data_parallel_machine(cluster: ClusterSpec, devices: int, tensor_bytes: int) -> OsdpMachine:
    """Alpha and beta of one ring over devices of a cluster.

    Parameters
    ----------
    cluster
        Where the ring's link comes from.
    devices
        How many share the data.
    tensor_bytes
        What tensors may take on one device.
    """
    (link,) = cluster.mesh_links((devices,))
    return OsdpMachine(devices, link.latency_seconds, 1 / link.bandwidth, tensor_bytes)


def _tied_alike(chain: LayerChain, machine: OsdpMachine, settings: OsdpSettings, found: OsdpPlan) -> OsdpPlan:
    """The plan with one mode for all layers that share a parameter, that of the embedding, which lends it.

    A tied parameter has one place on the devices, of which OSDP knows nothing; the bound stays.
    """
    lent = found.modes[chain.layers[0].name]
    borrowers = {layer.name for layer in chain.layers if layer.borrowed_parameter_bytes}
    modes = {name: lent if name in borrowers else mode for name, mode in found.modes.items()}
    if modes == found.modes:
        return found
    chosen = tuple(modes.values())
    choices = [settings.modes().index(mode) for mode in chosen]
    cost = step_cost(operator_tables(chain, machine, settings), choices, found.batch)
    objective = per_sample(cost, found.batch)
    return replace(
        found,
        status=Status.OPTIMAL if objective == found.bound else Status.FEASIBLE,
        modes=modes,
        objective=objective,
        gap=relative_gap(objective, found.bound),
        step_seconds=cost * SECONDS_PER_COST,
        samples_per_second=machine.devices * found.batch / (cost * SECONDS_PER_COST),
        memory_bytes=bytes_of(chain, machine, settings, chosen, found.batch),
        peak_bytes=bytes_of(chain, machine, replace(settings, accounting=Accounting.PEAK), chosen, found.batch),
    )


def _batch_per_device(request: LayerRequest) -> int:
    batch, rest = divmod(request.reference.batch, request.devices)
    if rest:
        multiple = -(-request.reference.batch // request.devices) * request.devices
        raise PlanError(
            f"batch {request.reference.batch} on {request.devices} devices: OSDP gives all of them as many samples; "
            f"use {multiple}"
        )
    return batch


def _settings(name: str, mode: Slicing, devices: int) -> LayerSettings:
    if mode.sharded == 0:
        return LayerSettings(name=name, data_parallel=devices)
    part = None if mode.sharded == mode.slices else mode.sharded
    return LayerSettings(name=name, data_parallel=devices, sharding="zero3", slices=mode.slices, sharded_slices=part)


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
        stage_peak_bytes=(found.peak_bytes,),
        tensor_bytes=request.tensor_bytes,
        notes=chain.notes,
    )
