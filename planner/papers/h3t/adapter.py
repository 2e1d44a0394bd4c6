"""H3T on a real model: the switches of every block, as a layer plan.

As published, the pruned dynamic program decides; else the labels in bytes decide, with a proof. Both synchronize all
segments, of one step, whose optimizer's place is a choice (:mod:`planner.layers.plan.choices`). Of a set of switches,
the layer executor enforces rematerialization (checkpointing), hidden offloading, partition (sharded data parallelism
that gathers parameters again before backward, or not) and lazy prefetching (parameters in host memory); the optimizer's
state is always in host memory. Embedding and head, which have no switches, are replicated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from formulations.h3t.costs import SECONDS_PER_COST, H3tMachine, Link, h3t_step
from formulations.h3t.dynamic_program import search_dp
from formulations.h3t.exact import least_memory, solve_synchronized
from formulations.h3t.operations import Switch
from formulations.h3t.problem import H3tError, H3tStep, Optimizer, Outcome
from formulations.h3t.segments import SYNCHRONIZED_SETS, SegmentTables, segment_tables
from formulations.h3t.slips import AS_PUBLISHED, REPAIRED, Slip
from formulations.layers.layer import LayerChain
from formulations.problem.solution import Status, relative_gap
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.common.units import format_bytes
from planner.layers.plan.choices import kept_slips, slip_names
from planner.layers.plan.document import LayerPlan, LayerRecord, LayerSettings, StagePlan
from planner.layers.plan.request import LayerRequest
from planner.machine.cluster import ClusterSpec
from planner.models.references import planned_model

HOST_MEMORY_BANDWIDTH = 20e9
"""Bytes/s that the CPU optimizer reaches for one device; assumed."""

UPDATE_TRAFFIC = 14
"""Bytes that Adam reads and writes for each byte of a shard: per parameter two of gradient and two of the new parameter
in 16 bits, and twice four each of parameter, mean and variance in 32 bits."""

_GAP = 1e-3
_TIMING_ONLY = (Switch.ECONOMICAL_FORWARD, Switch.ECONOMICAL_BACKWARD, Switch.SEGMENT_SYNC)


def plan_with_h3t(request: LayerRequest, chain: LayerChain) -> LayerPlan:
    """Choose the switches of every block.

    Raises
    ------
    PlanError
        The model has nothing between embedding and head, the devices cannot share the batch equally, or the batch is to
        be decided.
    InfeasibleError
        No switches fit, or as published none were found that do.
    """
    if request.search_batch:
        raise PlanError("formulation h3t does not search over batches: leave that search out")
    started = time.perf_counter()
    optimizer = Optimizer(request.choices["optimizer_runs"])
    machine = h3t_machine(request.cluster, request.devices)
    try:
        step = h3t_step(chain, machine, request.reference.batch, request.tensor_bytes, optimizer)
    except H3tError as error:
        raise PlanError(str(error)) from error
    tables = _pinned(request, chain, segment_tables(step), step.memory_limit)
    bound: int | None = None
    slips = kept_slips(Slip, AS_PUBLISHED, request.slips) if request.as_published else REPAIRED
    if request.as_published:
        published = search_dp(tables, step.memory_limit, slips=slips)
        sequence, outcome = published.sequence, published.outcome
    else:
        exact = solve_synchronized(tables, step.memory_limit, _GAP, time.monotonic() + request.time_limit)
        sequence, outcome, bound = exact.sequence, exact.outcome, exact.bound
    if sequence is None or outcome is None or outcome.peak > step.memory_limit:
        raise InfeasibleError(_why_nothing_fits(request, step, tables, outcome))
    blocks = zip(chain.layers[1:-1], sequence, strict=True)
    layers = (
        _border(chain.layers[0].name, request.devices),
        *(layer_settings(layer.name, Switch(switches), request.devices) for layer, switches in blocks),
        _border(chain.layers[-1].name, request.devices),
    )
    return LayerPlan(
        model=planned_model(request.reference),
        devices=request.devices,
        stages=(StagePlan(layers=layers),),
        optimizer=request.optimizer.name,
        seed=request.reference.seed,
        record=LayerRecord(
            formulation=request.formulation,
            as_published=request.as_published,
            solver="pruned dynamic program" if request.as_published else "labels",
            status=Status.OPTIMAL if bound == outcome.cost else Status.FEASIBLE,
            objective_seconds=outcome.cost * SECONDS_PER_COST,
            bound_seconds=None if bound is None else bound * SECONDS_PER_COST,
            gap=relative_gap(outcome.cost, bound),
            seconds=time.perf_counter() - started,
            stage_peak_bytes=(outcome.peak,),
            tensor_bytes=request.tensor_bytes,
            notes=(*chain.notes, _not_enforced(sequence)),
            choices=request.choices,
            slips=slip_names(slips),
            pins=request.pins,
        ),
    )


def _pinned(request: LayerRequest, chain: LayerChain, tables: SegmentTables, memory_limit: int) -> SegmentTables:
    """Tables in which switches that the request's pins forbid need more memory than there is.

    Raises
    ------
    PlanError
        The pins leave nothing to a layer.
    """
    if not request.is_restricted:
        return tables
    for border in (chain.layers[0].name, chain.layers[-1].name):
        if not request.allows(_border(border, request.devices)):
            raise request.refusal(border)
    forbidden = np.zeros((tables.layers, SYNCHRONIZED_SETS), dtype=np.bool_)
    for position, layer in enumerate(chain.layers[1:-1]):
        for switches in range(SYNCHRONIZED_SETS):
            settings = layer_settings(layer.name, Switch(switches), request.devices)
            forbidden[position, switches] = not request.allows(settings)
        if forbidden[position].all():
            raise request.refusal(layer.name)
    return tables.without(forbidden, memory_limit)


def h3t_machine(cluster: ClusterSpec, devices: int, host_memory_bandwidth: float = HOST_MEMORY_BANDWIDTH) -> H3tMachine:
    """Devices of a cluster in H3T's terms.

    Devices have links of their own where these are faster than the one to the host.

    Parameters
    ----------
    cluster
        Where links come from.
    devices
        How many share the data.
    host_memory_bandwidth
        Bytes/s that the CPU optimizer reaches for one device.
    """
    (ring,) = cluster.mesh_links((devices,))
    host = cluster.host_link_for((devices,))
    return H3tMachine(
        devices=devices,
        between=Link(ring.latency_seconds, 1 / ring.bandwidth),
        host=Link(host.latency_seconds, 1 / host.bandwidth),
        device_link=cluster.intra_node.bandwidth > cluster.host_link.bandwidth,
        update_seconds_per_byte=UPDATE_TRAFFIC / host_memory_bandwidth,
    )


def _why_nothing_fits(request: LayerRequest, step: H3tStep, tables: SegmentTables, found: Outcome | None) -> str:
    """Message on the least memory of any switches, and on its parts with all switches on."""
    all_on = tables.outcome([SYNCHRONIZED_SETS - 1] * tables.layers).peak
    room = f"memory for tensors {format_bytes(step.memory_limit)} on {request.devices} devices"
    try:
        least = least_memory(tables)
    except H3tError as error:
        return f"{room}: no switches were found; {error}"
    if least <= step.memory_limit:
        if not request.as_published:
            return (
                f"{room}: no switches were found in {request.time_limit:g} s, though {format_bytes(least)} are enough"
            )
        what = "finds no switches" if found is None else f"finds switches that need {format_bytes(found.peak)}"
        return (
            f"{room}: H3T as published {what}, though {format_bytes(least)} are enough; use more memory, or leave "
            "as-published out"
        )
    largest = max(step.layers, key=lambda layer: layer.activation_bytes + 2 * layer.parameter_bytes)
    return (
        f"{room}: H3T needs at least {format_bytes(least)}, {format_bytes(all_on)} with all switches on: one layer's "
        f"activations ({format_bytes(largest.activation_bytes)}), its gathered parameters and their gradient (2 x "
        f"{format_bytes(largest.parameter_bytes)}) are there while it computes backward, beside embedding and head "
        f"({format_bytes(step.borders.fixed_bytes)}); use more devices, more memory or a smaller batch"
    )


def layer_settings(name: str, switches: Switch, devices: int) -> LayerSettings:
    """Settings of the layer executor for a block's switches."""
    return LayerSettings(
        name=name,
        data_parallel=devices,
        sharding="zero3" if Switch.PARTITION in switches else "zero2",
        checkpoint=Switch.REMAT in switches,
        offload_hidden=Switch.OFFLOAD_HIDDEN in switches,
        offload_parameters=Switch.LAZY_PREFETCH in switches,
        # Offloaded parameters take the optimizer's state with them.
        offload_optimizer=Switch.LAZY_PREFETCH not in switches,
    )


def _border(name: str, devices: int) -> LayerSettings:
    return LayerSettings(name=name, data_parallel=devices, offload_optimizer=True)


def _not_enforced(sequence: Sequence[int]) -> str:
    """Number of layers with switches that change timing only."""
    counts = [(switch, sum(bool(switches & switch) for switches in sequence)) for switch in _TIMING_ONLY]
    listed = ", ".join(f"{switch.name.lower().replace('_', ' ')} of {count}" for switch, count in counts if switch.name)
    return f"switches that change only timing are not enforced, by layers that have them on: {listed}"
