"""Plans that shard, recompute and offload at random: bit-equal to the same plan without offload, right, and true.

True means that device and host bytes are measured as predicted.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from support.processes.rank_steps import groups_of, local_inputs, one_process, step_errors
from support.steps.planned_steps import plan_of, strategy_space, traced_step
from support.steps.random_plans import peaks_on_the_way
from support.steps.random_schedules import random_offload
from support.tiers import first

from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import LinkSpec
from planner.replay.checker import OptimizerMemory, replay
from planner.schedule.instructions import Compute, Offload
from planner.scheduling.builder import build_schedule
from planner.strategies.random_decision import random_decision
from runtime.commands.tables.run import run_table
from runtime.job.launch import run_plan
from runtime.measure.memory_meter import MemoryMeter
from runtime.operators.debug_oracle import compare_with_reference
from runtime.operators.executor import lower

CPU = torch.device("cpu")
FAMILIES = ("gpt2", "llama", "vit")
SGD = OptimizerMemory(optimizer_named("sgd"))


def run_both(name, plain, offloaded, seed):
    """Whether both schedules give the same bits, the errors of the second, and its measured peaks."""
    traced, groups = traced_step(name), groups_of(plain.mesh)
    full, loss, expected = one_process(name)
    first = lower(plain, traced, groups, seed, CPU).run(local_inputs(full, plain, groups))
    lowered, inputs = lower(offloaded, traced, groups, seed, CPU), local_inputs(full, offloaded, groups)
    meter = MemoryMeter(CPU, inputs)
    with meter.metering():
        second = lowered.run(inputs)
    same = torch.equal(first.loss, second.loss) and all(
        torch.equal(first.gradients[key], second.gradients[key]) for key in expected
    )
    errors = step_errors(name, offloaded, groups, second, loss, expected)
    return same, errors, meter.peak_bytes, meter.host_peak_bytes


def check_offload(pool, name, mesh, seed):
    space = strategy_space(name, mesh)
    plain = build_schedule(space, random_decision(space, seed))
    offloaded, costs = random_offload(name, plain, seed)
    before, after = (
        replay(space.graph, schedule, optimizer=SGD, seconds=costs, counter_based_random=True)
        for schedule in (plain, offloaded)
    )
    assert after.violations == ()
    assert after.peak_bytes <= before.peak_bytes
    assert after.total_quanta == before.total_quanta + after.stall_quanta
    assert any(isinstance(entry, Offload) for entry in offloaded.instructions)
    resharding = peaks_on_the_way(space.graph, offloaded, after)
    for same, (loss, gradient, worst), peak, host_peak in pool.run(run_both, name, plain, offloaded, seed):
        where = f"{name} on {mesh}, seed {seed}"
        assert same, where
        assert loss <= 1e-5, where
        assert gradient <= 1e-4, f"{where}; gradient of {worst}"
        assert host_peak == after.host.peak_bytes > 0, where
        assert peak <= after.peak_bytes, where
        assert resharding or peak == after.peak_bytes, where
    return any(isinstance(entry, Compute) and entry.recompute for entry in plain.instructions)


@pytest.mark.parametrize("name", first(1, FAMILIES))
def test_random_plans_with_offload_on_two_ranks(name, two_ranks):
    recomputing = [check_offload(two_ranks, name, (2,), seed) for seed in range(2)]
    assert any(recomputing)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [*FAMILIES, "conv_net"])
def test_many_random_plans_with_offload(name, two_ranks, four_ranks):
    for seed in range(100, 140):
        check_offload(two_ranks, name, (2,), seed)
    for seed in range(100, 110):
        check_offload(four_ranks, name, (2, 2), seed)


@pytest.mark.slow
def test_a_run_reports_host_memory_and_waiting():
    plain = build_schedule(strategy_space("gpt2", (2,)), random_decision(strategy_space("gpt2", (2,)), 0))
    slow = LinkSpec(latency_seconds=1e-6, bandwidth=1e8)
    schedule, costs = random_offload("gpt2", plain, 0, link=slow)
    plan = plan_of("gpt2", schedule, costs)
    report = run_plan(plan, steps=2, check=True)
    assert report.failures() == []
    assert report.measured_peak_bytes == report.predicted_peak_bytes == [plan.peak_bytes] * 2
    host = plan.decision.predicted.host
    assert report.measured_host_peak_bytes == report.predicted_host_peak_bytes == [host.peak_bytes] * 2
    assert host.stall_ns > 0
    assert report.predicted_stall_s == host.stall_ns / 1e9
    console = Console(record=True, width=200)
    console.print(run_table(plan, report))
    text = console.export_text()
    assert "peak host memory of rank 1" in text
    assert "waiting for host copies" in text


def dropout_run(plain, offloaded):
    traced, groups = traced_step("dropout_gpt"), groups_of(plain.mesh)
    full, _, _ = one_process("dropout_gpt")
    first, second = (
        lower(schedule, traced, groups, 5, CPU).run(local_inputs(full, schedule, groups))
        for schedule in (plain, offloaded)
    )
    same = torch.equal(first.loss, second.loss) and all(
        torch.equal(first.gradients[key], second.gradients[key]) for key in first.gradients
    )
    dist.barrier()
    return same, compare_with_reference(offloaded, traced, groups, full, seed=5)


@pytest.mark.slow
def test_dropout_masks_come_back_from_the_host_bit_for_bit(two_ranks):
    space = strategy_space("dropout_gpt", (2,))
    plain = build_schedule(space, random_decision(space, 1))
    offloaded, _ = random_offload("dropout_gpt", plain, 1, share=1.0)
    masks = {
        value.index
        for value in space.graph.values
        if value.producer is not None and space.graph.operators[value.producer].is_random
    }
    away = {offloaded.buffers[entry.source].value for entry in offloaded.instructions if isinstance(entry, Offload)}
    assert masks & away
    for same, mismatch in two_ranks.run(dropout_run, plain, offloaded):
        assert same
        assert mismatch is None
