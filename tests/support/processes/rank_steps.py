"""What a rank of a test compares its step with: the same step in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
import torch.distributed as dist
from support.steps.planned_steps import real_step, traced_step
from torch import Tensor

from planner.schedule.instructions import Schedule
from planner.strategies.traced_step import input_tensors
from planner.torch_adapter.local.collectives import MeshGroups
from planner.torch_adapter.tracing.step_module import step_loss
from runtime.measure.local_shards import local_block
from runtime.measure.reference import GRADIENT_FLOOR
from runtime.operators.executor import StepResult


@cache
def one_process(name: str, ignored_rows: int = 0) -> tuple[list[Tensor], float, dict[str, Tensor]]:
    """Global input tensors of a step, and its loss and gradients by eager autograd."""
    step = real_step(name)
    kwargs = dict(step.example_kwargs)
    if ignored_rows:
        kwargs["labels"] = kwargs["labels"].clone()
        kwargs["labels"][:ignored_rows] = -100
    loss = step_loss(step.module, step.example_args, kwargs, step.loss_fn)
    loss.backward()
    gradients = {key: p.grad for key, p in step.module.named_parameters() if p.grad is not None}
    return input_tensors(traced_step(name), step.module, step.example_args, kwargs), loss.item(), gradients


@cache
def groups_of(mesh: tuple[int, ...]) -> MeshGroups:
    """Process groups of a mesh of all ranks."""
    return MeshGroups.of(dist.init_device_mesh("cpu", mesh))


def local_inputs(full: Sequence[Tensor], schedule: Schedule, groups: MeshGroups) -> list[Tensor]:
    """This rank's blocks of the graph's inputs."""
    return [
        local_block(tensor, schedule.buffers[buffer].placement, groups.shape, groups.coordinate).clone(
            memory_format=torch.contiguous_format
        )
        for tensor, buffer in zip(full, schedule.inputs, strict=True)
    ]


def step_errors(
    name: str, schedule: Schedule, groups: MeshGroups, result: StepResult, loss: float, expected: Mapping[str, Tensor]
) -> tuple[float, float, str]:
    """Relative error of the loss, that of the worst gradient, and whose it is."""
    assert result.gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    values, worst = traced_step(name).graph.values, (0.0, "")
    for value, buffer in zip(traced_step(name).graph.inputs, schedule.inputs, strict=True):
        key = values[value].name
        if key in expected:
            block = local_block(expected[key], schedule.buffers[buffer].placement, groups.shape, groups.coordinate)
            assert result.gradients[key].shape == block.shape, key
            scale = max(float(expected[key].abs().max()), GRADIENT_FLOOR * largest)
            worst = max(worst, (float((result.gradients[key] - block).abs().max()) / scale, key))
    return abs(result.loss.item() - loss) / abs(loss), *worst
