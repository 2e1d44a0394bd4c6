"""Random plans against one process: any strategies and any recomputation must give the same gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.planned_steps import captured_step, real_step, strategy_space
from support.random_plans import random_decision

from planner.capture import input_tensors
from planner.optimizers import optimizer_named
from planner.replay import OptimizerMemory, replay
from planner.schedule_builder import build_schedule
from planner.torch_adapter.collectives import MeshGroups
from planner.torch_adapter.step_module import step_loss
from runtime.comparison import GRADIENT_FLOOR
from runtime.debug_oracle import compare_with_reference
from runtime.local_shards import local_block
from runtime.memory_meter import MemoryMeter
from runtime.operator_executor import lower

CPU = torch.device("cpu")


def gradients_of_one_process(step):
    loss = step_loss(step.module, step.example_args, dict(step.example_kwargs), step.loss_fn)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in step.module.named_parameters() if p.grad is not None}


def run_on_rank(name, schedule):
    """Errors of loss and gradients, and the measured bytes without optimizer; on a mismatch, where it starts."""
    captured, step = captured_step(name), real_step(name)
    groups = MeshGroups.of(dist.init_device_mesh("cpu", schedule.mesh))
    values = captured.graph.values
    full = input_tensors(captured, step.module, step.example_args, step.example_kwargs)
    inputs = [
        local_block(t, schedule.buffers[b].placement, groups.shape, groups.coordinate).clone(
            memory_format=torch.contiguous_format
        )
        for t, b in zip(full, schedule.inputs, strict=True)
    ]
    meter = MemoryMeter(CPU, inputs)
    lowered = lower(schedule, captured, groups, 0, CPU)
    with meter.metering():
        result = lowered.run(inputs)
    loss, expected = gradients_of_one_process(step)
    assert result.gradients.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    placements = {values[v].name: schedule.buffers[b].placement for v, b in zip(captured.graph.inputs, schedule.inputs, strict=True)}
    worst = (0.0, "")
    for key, gradient in expected.items():
        block = local_block(gradient, placements[key], groups.shape, groups.coordinate)
        assert result.gradients[key].shape == block.shape, key
        scale = max(float(gradient.abs().max()), GRADIENT_FLOOR * largest)
        worst = max(worst, (float((result.gradients[key] - block).abs().max()) / scale, key))
    failed = torch.tensor(float(not worst[0] <= 1e-4 or not abs(result.loss.item() - loss) <= 1e-5 * abs(loss)))
    dist.all_reduce(failed)
    blame = str(compare_with_reference(schedule, captured, groups, full)) if failed else ""
    return abs(result.loss.item() - loss) / abs(loss), *worst, meter.peak_bytes, blame


def check_plan(pool, name, mesh, seed):
    space = strategy_space(name, mesh)
    schedule = build_schedule(space, random_decision(space, seed))
    for loss_error, gradient_error, worst, _, blame in pool.run(run_on_rank, name, schedule):
        assert not blame, f"{name} seed {seed}: {blame} (loss {loss_error:.1e}, gradient {worst} {gradient_error:.1e})"
        assert loss_error <= 1e-5, (name, seed)
        assert gradient_error <= 1e-4, (name, seed, worst)
