"""A loss over classes that two ranks share, in 16 bits: the peak lies in the softmax and is the predicted one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from support.processes.rank_steps import groups_of, local_inputs
from support.steps.models import Step, gpt

from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.replay.checker import Category, OptimizerMemory, replay
from planner.schedule.instructions import Compute, Schedule
from planner.scheduling.builder import build_schedule
from planner.strategies.random_decision import random_decision
from planner.strategies.space import build_strategy_space
from planner.strategies.traced_step import TracedStep, input_tensors, trace_step
from runtime.measure.memory_meter import MemoryMeter
from runtime.operators.executor import lower

CPU = torch.device("cpu")
MESH, ROWS = (2,), 4 * 16
PER_ROW = 32
"""Bytes that sums, maxima and their exchange take per row: no plan counts them."""


@cache
def prepared() -> tuple[Step, TracedStep]:
    torch.manual_seed(0)
    step = gpt(vocabulary=8192, width=16, heads=2, layers=1)
    step[0].to(torch.bfloat16)
    return step, trace_step(*step)


def measured_on_rank(schedule: Schedule) -> int:
    step, traced = prepared()
    groups = groups_of(schedule.mesh)
    inputs = local_inputs(input_tensors(traced, *step[:3]), schedule, groups)
    lowered = lower(schedule, traced, groups, 0, CPU)
    meter = MemoryMeter(CPU, inputs)
    with meter.metering():
        lowered.run(inputs)
    return meter.peak_bytes


def test_the_peak_of_a_shared_softmax_is_what_was_predicted(two_ranks):
    _, traced = prepared()
    optimizer = optimizer_named("sgd")
    space = build_strategy_space(traced, CostModel(load_cluster("a100-8-nvlink"), MESH), MESH, optimizer)
    held = {k: node.workspace_bytes for k, node in enumerate(space.model.nodes) if node.workspace_bytes is not None}
    shared = [
        decision
        for decision in (random_decision(space, seed, recompute_share=0.0) for seed in range(20))
        if all(amount[decision.layouts[k]] > 0 for k, amount in held.items())
    ]
    schedule = build_schedule(space, replace(shared[0], recomputed={}))
    predicted = replay(traced.graph, schedule, optimizer=OptimizerMemory(optimizer))
    assert predicted.violations == ()
    at = schedule.instructions[predicted.peak_instruction]
    assert isinstance(at, Compute)
    assert "softmax" in traced.graph.operators[at.operator].target
    assert predicted.profile.transient[Category.WORKSPACE][predicted.peak_instruction] > predicted.peak_bytes / 4
    for measured in two_ranks.run(measured_on_rank, schedule):
        assert 0 <= measured - predicted.peak_bytes <= PER_ROW * ROWS
