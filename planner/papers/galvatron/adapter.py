"""Galvatron-BMW on a real model: stages, and how the devices of a stage share every layer, as a layer plan.

As published, the bi-objective search (Algorithm 2) decides, by costs with its slips; else stages, partition, strategies
and micro-batches are decided at once, with a proven gap. Both have one problem, whose strategies and numbers of
micro-batches are choices (:mod:`planner.layers.plan.choices`), and plan only what the layer executor runs: the levels
of a strategy nest replicas, shards and tensor parallelism in this order on one mesh of prime axes, layers that share a
parameter have one strategy, and with fewer micro-batches than stages a pipeline runs as GPipe does. The record has the
plan's cost without any slip.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from formulations.galvatron.costs import CostModel, DeviceLinks, Restriction
from formulations.galvatron.dynamic_program import DEFAULT_UNIT_BYTES, unit_for
from formulations.galvatron.joint import solve_joint
from formulations.galvatron.pipeline import (
    MicroBatchRule,
    PipelinePlan,
    PipelineProblem,
    SearchSpace,
    pipeline_problem,
)
from formulations.galvatron.published_search import search_bmw
from formulations.galvatron.slips import AS_PUBLISHED, REPAIRED, Slip
from formulations.layers.layer import LayerChain
from formulations.layers.pipeline_schedule import Schedule
from formulations.problem.solution import Progress, Status
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.common.units import format_bytes
from planner.layers.plan.choices import kept_slips, slip_names
from planner.layers.plan.document import LayerPlan, LayerRecord, StagePlan
from planner.layers.plan.request import LayerRequest
from planner.layers.plan.settings import strategy_settings
from planner.machine.cluster import ClusterSpec
from planner.models.references import planned_model

BATCHES_TRIED = 16
"""Batches that a search over them tries: multiples of the reference's."""

SECONDS_PER_COST = 1e-7

GAP = Fraction(1, 1000)
"""Gap at which the exact search ends."""

START_SHARE = 0.1
"""Part of the time for the plan that the exact search begins with."""


def plan_with_galvatron(request: LayerRequest, chain: LayerChain) -> LayerPlan:
    """Choose stages, partition, micro-batches and the strategy of every layer.

    Raises
    ------
    PlanError
        The batch and the layers cannot be divided among the devices.
    InfeasibleError
        Nothing fits the memory, or nothing was found.
    """
    started = time.perf_counter()
    problem = _problem(request, chain, REPAIRED)
    if not _divides(problem):
        if request.is_restricted:
            raise request.refusal()
        raise PlanError(
            f"batch {request.reference.batch} on {request.devices} devices: no stages, micro-batches and degrees "
            f"divide the batch and every layer; use a multiple of {request.devices}, which always divides, or fewer "
            "devices"
        )
    unit_bytes = unit_for(request.tensor_bytes)
    bound: Fraction | None = None
    gap: float | None = None
    notes = chain.notes
    slips = kept_slips(Slip, AS_PUBLISHED, request.slips) if request.as_published else REPAIRED
    if request.as_published:
        found = search_bmw(_problem(request, chain, slips), slips, unit_bytes, request.time_limit)
        plan = None if found.best is None else found.best.plan
        until = "" if found.ended else f" in its time limit of {request.time_limit:g} s"
        without = f"the published search finds no plan that fits{until}"
        notes += _search_notes(unit_bytes, until)
    else:
        start = _start(problem, unit_bytes, request.time_limit)
        joint = solve_joint(problem, GAP, start, request.time_limit, _reporter(request))
        plan, bound, gap = joint.plan, joint.bound, joint.gap
        proven = "no plan of Galvatron-BMW fits, which is proven"
        without = proven if bound is None else f"no plan that fits was found in {request.time_limit:g} s"
    cost = None if plan is None else problem.evaluate(plan)
    if cost is not None and not cost.fits:
        without = f"the published search finds a plan that needs {format_bytes(max(cost.stage_peaks))}"
    if plan is None or cost is None or not cost.fits:
        raise InfeasibleError(
            f"memory for tensors {format_bytes(request.tensor_bytes)} on {request.devices} devices: {without}; "
            "use more devices, more memory or a smaller batch"
        )
    bound_cost = None if bound is None else bound * plan.batch
    record = LayerRecord(
        formulation=request.formulation,
        as_published=request.as_published,
        solver="bi-objective search" if request.as_published else "joint",
        status=Status.OPTIMAL if bound_cost == cost.cost else Status.FEASIBLE,
        objective_seconds=cost.cost * SECONDS_PER_COST,
        bound_seconds=None if bound_cost is None else float(bound_cost) * SECONDS_PER_COST,
        gap=gap,
        seconds=time.perf_counter() - started,
        stage_peak_bytes=cost.stage_peaks,
        tensor_bytes=request.tensor_bytes,
        notes=notes,
        choices=request.choices,
        slips=slip_names(slips),
        pins=request.pins,
    )
    return LayerPlan(
        model=planned_model(request.reference, plan.batch),
        devices=request.devices,
        stages=_stages(chain, problem, plan),
        micro_batches=plan.micro_batches,
        schedule="1f1b" if plan.micro_batches >= plan.stages else "gpipe",
        optimizer=request.optimizer.name,
        seed=request.reference.seed,
        record=record,
    )


def _reporter(request: LayerRequest) -> Callable[[Fraction | None, Fraction], None] | None:
    """Reports the search's quanta per sample as nanoseconds of a step of the request's batch."""
    progress, started = request.progress, time.perf_counter()
    if progress is None:
        return None
    scale = Fraction(request.reference.batch) * round(SECONDS_PER_COST * 1e9)

    def report(best: Fraction | None, bound: Fraction) -> None:
        incumbent = None if best is None else int(best * scale)
        assert progress is not None
        progress(Progress(time.perf_counter() - started, incumbent, int(bound * scale), "joint"))

    return report


def _start(problem: PipelineProblem, unit_bytes: int, time_limit: float) -> PipelinePlan | None:
    """The plan of the paper's search without its slips, as far as it gets in a part of the time."""
    found = search_bmw(problem, REPAIRED, unit_bytes, START_SHARE * time_limit).best
    return None if found is None else found.plan


def _divides(problem: PipelineProblem) -> bool:
    """Whether some stages, micro-batches and strategies divide every layer evenly, apart from the memory limit."""
    for batch in problem.batches:
        for stages in problem.usable_degrees:
            for count in problem.rule.counts(batch, stages):
                tables = problem.tables(stages, batch // count)
                if tables.allowed[tables.kinds].any(axis=1).all() and problem.shared_strategies(stages, batch // count):
                    return True
    return False


def device_links(cluster: ClusterSpec) -> DeviceLinks:
    """Bandwidths of a cluster as the estimator takes them."""
    between = cluster.intra_node if cluster.inter_node is None else cluster.inter_node
    return DeviceLinks(cluster.devices_per_node, cluster.intra_node.bandwidth, between.bandwidth)


def _problem(request: LayerRequest, chain: LayerChain, slips: Slip) -> PipelineProblem:
    """The problem of both searches; slips change estimates of its costs alone."""
    choices, batch, links = request.choices, request.reference.batch, device_links(request.cluster)
    return pipeline_problem(
        chain,
        request.devices,
        request.tensor_bytes,
        tuple(batch * k for k in range(1, BATCHES_TRIED + 1)) if request.search_batch else (batch,),
        CostModel(
            replace(links, devices_per_node=min(links.devices_per_node, request.devices)),
            states_per_parameter=request.states_per_parameter,
            seconds_per_cost=SECONDS_PER_COST,
            slips=slips,
        ),
        SearchSpace(data_with_sharded=choices["strategies"] == "all", any_order=False, tied_alike=True),
        Schedule.ONE_F_ONE_B_IF_FILLED,
        MicroBatchRule.DIVISORS if choices["micro_batches"] == "all" else MicroBatchRule.TWICE_THE_STAGES,
        _restriction(request, chain),
    )


def _restriction(request: LayerRequest, chain: LayerChain) -> Restriction | None:
    """What the request's pins leave to layers."""
    if not request.is_restricted:
        return None
    return Restriction(
        tuple(request.left_to(layer.name) for layer in chain.layers),
        lambda position, strategy: request.allows(strategy_settings(chain.layers[position], strategy)),
    )


def _search_notes(unit_bytes: int, until: str) -> tuple[str, ...]:
    """Notes on differences of the published search here from the paper; `until` is where its time was over."""
    notes = ["strategies nest replicas, shards and tensor parallelism in this order, which is what runs"]
    if unit_bytes < DEFAULT_UNIT_BYTES:
        notes.append(
            f"memory is counted in units of {format_bytes(unit_bytes)}, not of {format_bytes(DEFAULT_UNIT_BYTES)}: the "
            "limit is below the paper's"
        )
    if until:
        notes.append(f"the search did not end{until}: this is the best plan until then")
    return tuple(notes)


def _stages(chain: LayerChain, problem: PipelineProblem, plan: PipelinePlan) -> tuple[StagePlan, ...]:
    strategies = problem.tables(plan.stages, plan.batch // plan.micro_batches).strategies
    layers = [
        strategy_settings(layer, strategies[choice]) for layer, choice in zip(chain.layers, plan.choices, strict=True)
    ]
    return tuple(StagePlan(layers=tuple(layers[first:end])) for first, end in pairwise(plan.borders))
