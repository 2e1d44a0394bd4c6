"""Galvatron-BMW on a real model: stages, and how the devices of a stage share every layer, as a layer plan.

As published, the bi-objective search (Algorithm 2) decides, with its slips; else stages, partition, strategies and
micro-batches are decided at once, with a proven gap.
"""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from formulations.layers import LayerChain, LayerProfile
from formulations.models.galvatron_costs import CostModel, DeviceLinks
from formulations.models.galvatron_pipeline import (
    MicroBatchRule,
    PipelinePlan,
    PipelineProblem,
    Schedule,
    SearchSpace,
    pipeline_problem,
)
from formulations.models.galvatron_slips import REPAIRED, RUNNABLE, Slip
from formulations.models.galvatron_strategies import Dimension, LayerStrategy
from formulations.searches.galvatron_joint import solve_joint
from formulations.searches.galvatron_search import search_bmw
from formulations.solution import Status, relative_gap
from planner.cluster import ClusterSpec
from planner.infeasibility import InfeasibleError
from planner.layer_plan import LayerPlan, LayerRecord, LayerSettings, StagePlan
from planner.layer_request import LayerRequest, planned_model
from planner.plan_error import PlanError
from planner.units import format_bytes

BATCHES_TRIED = 16
"""Batches that a search over them tries: multiples of the reference's."""

SECONDS_PER_COST = 1e-7


def plan_with_galvatron(request: LayerRequest, chain: LayerChain) -> LayerPlan:
    """Choose stages, partition, micro-batches and the strategy of every layer.

    Raises
    ------
    ValueError
        The number of devices is no power of two.
    InfeasibleError
        Nothing fits the memory, or nothing was found.
    """
    started = time.perf_counter()
    slips = RUNNABLE if request.as_published else REPAIRED
    problem = _problem(request, chain, slips)
    bound: Fraction | None = None
    if request.as_published:
        found = search_bmw(problem, slips)
        plan = None if found is None else found.plan
    else:
        joint = solve_joint(problem, time_limit=request.time_limit)
        plan, bound = joint.plan, joint.bound
    if plan is None:
        raise InfeasibleError(
            f"memory for tensors {format_bytes(request.tensor_bytes)} on {request.devices} devices: Galvatron finds no "
            "plan that fits; use more devices, more memory or a smaller batch"
        )
    if plan.micro_batches < plan.stages:  # too few for 1F1B
        problem = replace(problem, schedule=Schedule.GPIPE)
    plan = _tied_alike(chain, problem, plan)
    if plan is None or not problem.evaluate(plan).fits:
        raise InfeasibleError(
            f"memory for tensors {format_bytes(request.tensor_bytes)}: the plan found cannot be run as it is (layers "
            "that share a parameter have different strategies, or there are too few micro-batches for 1F1B), and does "
            "not fit as it can; use more memory"
        )
    cost = problem.evaluate(plan)
    bound_cost = None if bound is None else bound * plan.batch
    record = LayerRecord(
        formulation=request.formulation,
        as_published=request.as_published,
        solver="bi-objective search" if request.as_published else "joint",
        status=Status.OPTIMAL if bound_cost == cost.cost else Status.FEASIBLE,
        objective_seconds=cost.cost * SECONDS_PER_COST,
        bound_seconds=None if bound_cost is None else float(bound_cost) * SECONDS_PER_COST,
        gap=None if bound_cost is None else relative_gap(cost.cost, int(bound_cost)),
        seconds=time.perf_counter() - started,
        stage_peak_bytes=cost.stage_peaks,
        tensor_bytes=request.tensor_bytes,
        notes=chain.notes,
    )
    return LayerPlan(
        model=planned_model(request.reference, plan.batch),
        devices=request.devices,
        stages=_stages(chain, problem, plan),
        micro_batches=plan.micro_batches,
        schedule=problem.schedule.value,
        optimizer=request.optimizer.name,
        seed=request.reference.seed,
        record=record,
    )


def device_links(cluster: ClusterSpec) -> DeviceLinks:
    """Bandwidths of a cluster as the estimator takes them."""
    between = cluster.intra_node if cluster.inter_node is None else cluster.inter_node
    return DeviceLinks(cluster.devices_per_node, cluster.intra_node.bandwidth, between.bandwidth)


def _problem(request: LayerRequest, chain: LayerChain, slips: Slip) -> PipelineProblem:
    batch = request.reference.batch
    return pipeline_problem(
        chain,
        request.devices,
        request.tensor_bytes,
        tuple(batch * k for k in range(1, BATCHES_TRIED + 1)) if request.search_batch else (batch,),
        CostModel(
            device_links(request.cluster),
            states_per_parameter=request.states_per_parameter,
            seconds_per_cost=SECONDS_PER_COST,
            slips=slips,
        ),
        SearchSpace(data_with_sharded=Slip.TAKEAWAY_3 not in slips),
        Schedule.ONE_F_ONE_B,
        MicroBatchRule.TWICE_THE_STAGES if Slip.MICRO_BATCHES in slips else MicroBatchRule.DIVISORS,
    )


def _tied_alike(chain: LayerChain, problem: PipelineProblem, plan: PipelinePlan) -> PipelinePlan | None:
    """The cheapest plan that fits and differs from this one in its tied layers alone, which have one strategy.

    A tied parameter has one place on the devices, of which Galvatron knows nothing.
    """
    tied = [k for k, layer in enumerate(chain.layers) if layer.borrowed_parameter_bytes]
    if not tied:
        return plan
    alike = {0, *tied}  # the embedding lends
    best: tuple[int, PipelinePlan] | None = None
    for strategy in range(len(problem.tables(plan.stages, plan.batch // plan.micro_batches).strategies)):
        choices = tuple(strategy if k in alike else choice for k, choice in enumerate(plan.choices))
        candidate = replace(plan, choices=choices)
        found = problem.evaluate(candidate)
        if found.fits and (best is None or found.cost < best[0]):
            best = found.cost, candidate
    return None if best is None else best[1]


def _stages(chain: LayerChain, problem: PipelineProblem, plan: PipelinePlan) -> tuple[StagePlan, ...]:
    strategies = problem.tables(plan.stages, plan.batch // plan.micro_batches).strategies
    layers = [_settings(layer, strategies[choice]) for layer, choice in zip(chain.layers, plan.choices, strict=True)]
    return tuple(StagePlan(layers=tuple(layers[first:end])) for first, end in pairwise(plan.borders))


def _settings(layer: LayerProfile, strategy: LayerStrategy) -> LayerSettings:
    """Settings of one layer; a stage's mesh has replicas outermost, then shards, then tensor parallelism.

    Raises
    ------
    PlanError
        The strategy nests them otherwise.
    """
    dimensions = [level.dimension for level in strategy.levels]
    if dimensions != sorted(dimensions, key=tuple(Dimension).index):
        raise PlanError(
            f"layer {layer.name}: {strategy} puts {dimensions[0]} around {dimensions[-1]}; what runs it nests dp, sdp "
            "and tp in this order: plan for devices of one node, where the order makes no difference"
        )
    shards = strategy.degree(Dimension.SHARDED)
    return LayerSettings(
        name=layer.name,
        data_parallel=strategy.sample_parts,
        sharding="zero3" if shards > 1 else "none",
        shard_degree=shards if shards > 1 else None,
        tensor_parallel=strategy.degree(Dimension.TENSOR),
        undivided=layer.split.divisor == 0,
        checkpoint=strategy.checkpoint,
    )
