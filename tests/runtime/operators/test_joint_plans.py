"""Plans of kiwi_offload that shard, recompute chains and offload at once: right on ranks, and true in every byte."""

from __future__ import annotations

import contextlib
from functools import cache

import pytest
import torch
from support.processes.rank_steps import groups_of, local_inputs, one_process, step_errors
from support.steps.planned_steps import step_reference, traced_step
from support.steps.random_plans import peaks_on_the_way
from support.tiers import first

from planner.common.infeasibility import InfeasibleError
from planner.graph.optimizers import optimizer_named
from planner.graph.placement import REPLICATE
from planner.machine.cluster import LinkSpec, load_cluster
from planner.replay.checker import OptimizerMemory, replay
from planner.schedule.instructions import Compute, Offload
from planner.session import PlanningSession, PlanRequest
from runtime.measure.memory_meter import MemoryMeter
from runtime.operators.executor import lower

CPU = torch.device("cpu")
SGD = OptimizerMemory(optimizer_named("sgd"))
LIMITS = {
    (2,): {"gpt2": (0.45, 20_000), "llama": (0.7, 12_000), "vit": (0.6, 8_000)},
    (2, 2): {"gpt2": (0.7, 30_000), "vit": (0.65, 16_000)},
}
"""Share of the peak without a limit, and bytes of the host: too little for recomputation or offload alone."""

HOST_LINKS = {
    (2,): LinkSpec(latency_seconds=1e-6, bandwidth=1e10),
    (2, 2): LinkSpec(latency_seconds=1e-9, bandwidth=1e13),  # a quarter of a step this small hides no slower copies
}
SECONDS = {(2,): 3.0, (2, 2): 10.0}
PATIENCE = (1, 2, 4)
"""Times these seconds, one after another: on a loaded machine a search may end before it has a plan that offloads."""

RUNS = 10
LABELS = 4 * 16
"""Tokens of a step; labels have eight bytes."""


@cache
def session(name, mesh):
    links = {"host_link": HOST_LINKS[mesh], "intra_node": LinkSpec(latency_seconds=0.0, bandwidth=1e12)}
    cluster = load_cluster("a100-8-nvlink").model_copy(update=links)
    return PlanningSession(step_reference(name), cluster, mesh)


def joint_schedule(name, mesh, pool):
    """A plan under a binding limit, asserted to use everything that there is."""
    here, (share, host_bytes) = session(name, mesh), LIMITS[mesh][name]
    free = here.solve(PlanRequest(None, "sharding", time_limit=10, workers=1), pool=pool)
    reserve = here.costs.device.reserve_bytes
    limit = int(share * here.execute(free.decision).peak)
    for times in PATIENCE:
        seconds = times * SECONDS[mesh]
        request = PlanRequest(reserve + limit, "kiwi_offload", time_limit=seconds, workers=1, host_memory=host_bytes)
        with contextlib.suppress(InfeasibleError):
            decision = here.solve(request, pool=pool).decision
            again = decision.recomputed
            chained = any(edge.producer in again and edge.consumer in again for edge in here.space.model.edges)
            if decision.offloaded and chained:
                break
    schedule = here.schedule(decision, limit)
    report = here.replay(schedule, limit)
    assert report.violations == ()
    assert report.peak_bytes <= limit
    assert 0 < report.host.peak_bytes <= host_bytes
    assert chained
    assert any(isinstance(entry, Offload) for entry in schedule.instructions)
    computed = [entry for entry in schedule.instructions if isinstance(entry, Compute)]
    placements = {schedule.buffers[out].placement for entry in computed for out in entry.outputs if out is not None}
    assert any(word != REPLICATE for placement in placements for word in placement), "nothing is sharded"
    return schedule


def run_on_rank(name, schedule):
    """Errors against one process, and the measured peaks of the device and the host.

    The transport holds a small tensor a little longer now and then, so the peak is the least of several runs.
    """
    groups = groups_of(schedule.mesh)
    full, loss, expected = one_process(name)
    lowered = lower(schedule, traced_step(name), groups, 0, CPU)
    peaks = []
    for _ in range(RUNS):
        inputs = local_inputs(full, schedule, groups)
        meter = MemoryMeter(CPU, inputs)
        with meter.metering():
            result = lowered.run(inputs)
        peaks.append((meter.peak_bytes, meter.host_peak_bytes))
    errors = step_errors(name, schedule, groups, result, loss, expected)
    return errors, min(peak for peak, _ in peaks), peaks[0][1]


def uncounted_labels(name, schedule):
    """Bytes of the labels that a loss sharded by words looks up on its own; see planner.graph.operator_workspaces."""
    graph = traced_step(name).graph
    sharded = False
    for entry in schedule.instructions:
        if isinstance(entry, Compute) and "nll_loss" in graph.operators[entry.operator].target:
            sharded |= any("S1" in schedule.buffers[buffer].placement for buffer in entry.inputs)
    return 8 * LABELS if sharded else 0


def check_joint_plan(ranks, name, mesh, pool):
    schedule = joint_schedule(name, mesh, pool)
    predicted = replay(session(name, mesh).traced.graph, schedule, optimizer=SGD, counter_based_random=True)
    resharding = peaks_on_the_way(session(name, mesh).traced.graph, schedule, predicted)
    for (loss, gradient, worst), peak, host_peak in ranks.run(run_on_rank, name, schedule):
        assert loss <= 1e-5
        assert gradient <= 1e-4, f"gradient of {worst}"
        assert host_peak == predicted.host.peak_bytes
        assert peak <= predicted.peak_bytes + uncounted_labels(name, schedule)
        assert resharding or peak >= predicted.peak_bytes


@pytest.mark.parametrize("name", first(1, LIMITS[(2,)]))
def test_a_joint_plan_on_two_ranks(name, two_ranks, pool):
    check_joint_plan(two_ranks, name, (2,), pool)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", LIMITS[2, 2])
def test_a_joint_plan_on_two_by_two_ranks(name, four_ranks, pool):
    check_joint_plan(four_ranks, name, (2, 2), pool)
