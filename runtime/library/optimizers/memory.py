"""Predicted peak of a plan's step with the user's optimizer in the place of the plan's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from planner.common.units import format_bytes
from planner.graph.operator_graph import ITEM_BYTES, OperatorGraph, TensorSpec
from planner.graph.optimizers import OptimizerSpec
from planner.replay.checker import OptimizerMemory, replay
from planner.replay.memory import LocalBytes
from planner.schedule.instructions import Free, Instruction, Schedule, Update
from runtime.library.optimizers.probe import (
    ElementBytes,
    OptimizerFactory,
    OptimizerRefusedError,
    element_bytes,
    is_fused,
    make_optimizer,
    stand_ins,
)
from runtime.library.optimizers.user import UpdateOrder


class MemoryWarning(UserWarning):
    """A step needs more memory than its plan predicted, within the plan's limit."""


@dataclass(frozen=True, slots=True)
class MeasuredOptimizer(OptimizerMemory):
    """Bytes of an optimizer as measured, by the dtype of the parameter.

    Parameters
    ----------
    per_element
        Master copies of 16-bit parameters counted as state.
    fused
        Whether a gradient is copied where it lies otherwise than its parameter, too.
    """

    per_element: Mapping[str, ElementBytes] = field(default_factory=dict)
    fused: bool = False

    def with_gradients(self) -> MeasuredOptimizer:
        """The same with a sum of gradients, which lives as long as the state."""
        more = {
            dtype: replace(entry, state=entry.state + replace(self.spec, micro_batches=2).state(dtype).item_bytes)
            for dtype, entry in self.per_element.items()
        }
        return replace(self, per_element=more)

    def state_bytes(self, parameter: TensorSpec, local_numel: int) -> int:
        """Bytes that live for the whole step."""
        return self.per_element[parameter.dtype].state * local_numel

    def workspace_bytes(self, parameter: TensorSpec, gradient: TensorSpec, local_numel: int) -> int:
        """Bytes that live only while the parameter is updated; a gradient of another dtype is copied."""
        trained = self.spec.trained(parameter.dtype)
        copies = gradient.dtype != trained or (self.fused and not gradient.is_contiguous)
        copied = ITEM_BYTES[trained] if copies else 0
        return (self.per_element[parameter.dtype].workspace + copied) * local_numel


def predicted_peak(
    graph: OperatorGraph, schedule: Schedule, optimizer: MeasuredOptimizer, order: UpdateOrder, device: str = "cpu"
) -> int:
    """Most bytes of one device during a step, by a replay of what is run.

    Parameters
    ----------
    graph, schedule
        The traced step, and the plan's schedule.
    optimizer
        Bytes of the optimizer.
    order
        When it runs.
    device
        Kind of device that the plan is for.
    """
    run = schedule if order is UpdateOrder.AS_PLANNED else with_updates_last(schedule, order)
    if order is not UpdateOrder.AT_ONCE:
        report = replay(graph, run, optimizer=optimizer, device=device)
        assert report.peak_bytes, "the schedule was checked before"
        return report.peak_bytes
    none = {dtype: replace(entry, workspace=0) for dtype, entry in optimizer.per_element.items()}
    report = replay(graph, run, optimizer=replace(optimizer, per_element=none), device=device)
    assert report.peak_bytes, "the schedule was checked before"
    first = next(at for at, entry in enumerate(run.instructions) if isinstance(entry, Update))
    return max(report.peak_bytes, int(report.profile.total_during[first]) + _all_workspaces(graph, run, optimizer))


def with_updates_last(schedule: Schedule, order: UpdateOrder) -> Schedule:
    """The schedule with its updates behind everything else, so that all gradients live until then."""
    updates = [entry for entry in schedule.instructions if isinstance(entry, Update)]
    gradients = {entry.gradient for entry in updates}
    instructions: list[Instruction] = []
    last: list[Instruction]
    for entry in schedule.instructions:
        if isinstance(entry, Update):
            continue
        if isinstance(entry, Free):
            entry = Free(tuple(buffer for buffer in entry.buffers if buffer not in gradients))
            if not entry.buffers:
                continue
        instructions.append(entry)
    if order is UpdateOrder.AT_ONCE:
        last = [*updates, Free(tuple(sorted(gradients)))]
    else:
        left = [entry.gradient for entry in updates]
        last = []
        for at, update in enumerate(updates):
            last.append(update)
            if update.gradient not in left[at + 1 :]:
                last.append(Free((update.gradient,)))
    return replace(schedule, instructions=(*instructions, *last))


def measured_optimizer(
    factory: OptimizerFactory,
    trained: Mapping[str, Tensor],
    spec: OptimizerSpec,
    clip_norm: float | None,
    device: torch.device,
) -> MeasuredOptimizer:
    """Bytes of an optimizer per element of the trained parameters, by their dtype.

    Parameters
    ----------
    factory
        The optimizer.
    trained
        Parameters of the model, or tensors like them.
    spec
        What the plan assumed, master copies of 16-bit parameters among it.
    clip_norm
        As :func:`runtime.load` takes it.
    device
        Where to measure.
    """
    dimensions = {name: tensor.ndim for name, tensor in trained.items()}
    per_element: dict[str, ElementBytes] = {}
    for name, tensor in trained.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype in per_element:
            continue
        trained_dtype: torch.dtype = getattr(torch, spec.trained(dtype))
        found = element_bytes(factory, dimensions, name, trained_dtype, device)
        master = trained_dtype.itemsize if spec.keeps_master(dtype) else 0
        workspace = found.workspace if clip_norm is None else max(found.workspace, trained_dtype.itemsize)
        per_element[dtype] = ElementBytes(found.state + master, workspace)
    fused = is_fused(make_optimizer(factory, list(stand_ins(dimensions, device).items())))
    return MeasuredOptimizer(spec, per_element, fused)


def check_excess(peak: int, planned: int, limit: int | None, factory: OptimizerFactory, planned_name: str) -> None:
    """Warn on rank 0 where a step needs more bytes than its plan predicted.

    Raises
    ------
    OptimizerRefusedError
        It needs more than the limit, which the plan kept.
    """
    if peak <= planned:
        return
    named = getattr(getattr(factory, "func", factory), "__name__", "this optimizer")
    message = (
        f"with {named} a step needs {peak} bytes on each device, {peak - planned} bytes "
        f"({format_bytes(peak - planned)}) more than the {planned} that the plan predicted with {planned_name}"
    )
    if limit is not None and planned <= limit < peak:
        raise OptimizerRefusedError(
            f"{message} and {peak - limit} more than its limit of {limit} allows: plan with the memory, or for an "
            "optimizer with as much state; with fused=True AdamW holds less while it updates"
        )
    if dist.get_rank() == 0:
        remedy = f"{message}; plan for an optimizer with as much state; with fused=True AdamW holds less"
        warnings.warn(remedy, MemoryWarning, stacklevel=4)


def _all_workspaces(graph: OperatorGraph, schedule: Schedule, optimizer: MeasuredOptimizer) -> int:
    local = LocalBytes(graph, schedule.mesh)
    total = 0
    for entry in schedule.instructions:
        if isinstance(entry, Update):
            buffer = schedule.buffers[entry.parameter]
            spec, gradient = (graph.values[at].spec for at in (buffer.value, schedule.buffers[entry.gradient].value))
            total += optimizer.workspace_bytes(spec, gradient, local.numel(buffer.value, buffer.placement))
    return total
