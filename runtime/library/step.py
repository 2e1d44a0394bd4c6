"""The step that a training loop calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planner.common.units import format_bytes, format_seconds
from planner.graph.operator_graph import ValueRole
from planner.graph.placement import Placement
from planner.plan.document import Plan
from planner.plan.rendering import html_table, text_table
from planner.schedule.instructions import Schedule
from planner.strategies.traced_step import TracedStep
from planner.torch_adapter.local.collectives import MeshGroups
from runtime.library.batch import Batch, BatchShares
from runtime.library.checkpoint import load_checkpoint, save_checkpoint
from runtime.library.dtensors import as_dtensor
from runtime.library.evaluation import evaluation_step
from runtime.library.export import export
from runtime.library.optimizer import UserOptimizer
from runtime.measure.initial_state import copied
from runtime.operators.executor import LoweredStep, lower
from runtime.operators.training import LocalTraining


class Summary:
    """Main figures of a loaded step; shows itself as a table in a notebook."""

    def __init__(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        self._title, self.rows = title, list(rows)

    def __repr__(self) -> str:
        return self._title

    def __str__(self) -> str:
        return text_table(self.rows)

    def _repr_html_(self) -> str:
        return html_table(self.rows)


class Step:
    """A training step as a plan says, made by :func:`runtime.load`; every method is a collective of all ranks.

    Attributes
    ----------
    plan, device, mesh, groups
        The plan, the device of this rank, the device mesh of the job, and its process groups.
    optimizer
        The torch optimizer over this rank's shards: learning-rate schedulers take it.
    module
        The module, whose parameters and buffers are DTensors under the plan's placements.
    shares
        Which part of a batch this rank reads.
    peak_bytes
        Predicted peak of this rank with its optimizer.
    """

    def __init__(
        self,
        plan: Plan,
        module: nn.Module,
        traced: TracedStep,
        schedule: Schedule,
        training: LocalTraining,
        groups: MeshGroups,
        mesh: DeviceMesh,
        device: torch.device,
        names: Sequence[str],
        peak_bytes: int,
    ) -> None:
        self.plan, self.module, self.mesh, self.device = plan, module, mesh, device
        self.training = training
        self.peak_bytes = peak_bytes
        self.shares = BatchShares(traced.graph, schedule, names, groups.coordinate)
        self._traced, self._schedule, self.groups = traced, schedule, groups
        self.constants = frozenset(traced.constants)
        assert isinstance(training.optimizer, UserOptimizer)
        self.updates: UserOptimizer = training.optimizer
        self.optimizer: torch.optim.Optimizer = self.updates.torch
        self.shapes = {
            value.name: value.spec.shape for value in (traced.graph.values[at] for at in traced.graph.inputs)
        }

    def __call__(self, batch: Batch) -> Tensor:
        """Forward, backward and optimizer on one batch.

        Parameters
        ----------
        batch
            Tensors by name, in the order of the step's arguments, or the only one. Each is the global tensor, the rows
            of :attr:`BatchShares.rows`, or this rank's block.

        Returns
        -------
        Tensor
            Loss of the whole batch before the update, a scalar on the device, the same on every rank.
        """
        clip = None if self.updates.clipping is None else self.updates.clip
        return self.training.run(self.shares.blocks(batch), on_gradients=clip)

    def evaluate(self, batch: Batch) -> Tensor:
        """Loss of a batch by the forward alone: without dropout, batch norms by their running statistics.

        What else a module does in training mode only (branches on ``self.training``) stays as it was traced.
        """
        lowered, roles = self._forward
        blocks = self.shares.blocks(batch)
        inputs = [
            self.training.state[name]
            if role in (ValueRole.PARAMETER, ValueRole.BUFFER)
            else copied(blocks[name], self.device)
            if role is ValueRole.INPUT
            else torch.ones(self.shapes[name], device=self.device)
            for name, role in roles
        ]
        return lowered.begin(inputs).loss

    @cached_property
    def _forward(self) -> tuple[LoweredStep, tuple[tuple[str, ValueRole], ...]]:
        traced, schedule = evaluation_step(self._traced, self._schedule)
        values = (traced.graph.values[at] for at in traced.graph.inputs)
        lowered = lower(schedule, traced, self.groups, 0, self.device)
        return lowered, tuple((value.name, value.role) for value in values)

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self.updates.step_count

    @property
    def runs_on_device(self) -> bool:
        """Whether the optimizer keeps its counts of steps on the device of the parameters."""
        return any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)

    @property
    def gradient_norm(self) -> Tensor | None:
        """Norm of the last step's gradients before clipping, a scalar; None without ``clip_norm``."""
        return self.updates.total_norm

    def placement(self, name: str) -> Placement:
        """Placement of a parameter or module buffer, one entry per mesh axis."""
        return self.training.placements[name]

    def as_dtensor(self, name: str, local: Tensor) -> DTensor:
        """A tensor of the shape of this rank's shard of parameter ``name`` as a DTensor like the parameter."""
        return as_dtensor(local, self.placement(name), self.shapes[name], self.mesh)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers as DTensors, by the module's names; they share the step's memory."""
        return dict(self.module.state_dict())

    def save(
        self,
        folder: Path | str,
        scheduler: Any | None = None,
        position: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> Path:
        """Write a checkpoint; as :func:`runtime.library.checkpoint.save_checkpoint`."""
        return save_checkpoint(self, folder, scheduler, position, keep)

    def resume(self, path: Path | str, scheduler: Any | None = None) -> dict[str, Any]:
        """Continue from a checkpoint; as :func:`runtime.library.checkpoint.load_checkpoint`."""
        return load_checkpoint(self, path, scheduler)

    def export(self, path: Path | str) -> Path:
        """Write whole weights into one safetensors file; as :func:`runtime.library.export.export`."""
        return export(self, path)

    def summary(self) -> Summary:
        """Main figures."""
        options, predicted = self.plan.decision.options, self.plan.decision.predicted
        mesh = "x".join(map(str, options.mesh))
        held = sum(parameter.nbytes for parameter in self.updates.parameters.values())
        rows = self.shares.rows
        read = f"rows {rows.start} to {rows.stop - 1} of {self.shares.batch_size}" if rows else "all"
        name = type(self.optimizer).__name__
        return Summary(
            f"<step of {self.plan.decision.model.source} on {mesh}: {format_seconds(self.plan.objective_seconds)} "
            f"predicted, peak {format_bytes(self.peak_bytes)}, {self.steps} steps taken>",
            [
                ("model", self.plan.decision.model.source),
                ("mesh", f"{mesh}, this rank at {self.groups.coordinate}, on {self.device}"),
                ("steps taken", str(self.steps)),
                ("predicted step", format_seconds(self.plan.objective_seconds)),
                (
                    "predicted peak",
                    f"{format_bytes(self.peak_bytes)}, of the plan {format_bytes(predicted.peak_bytes)}",
                ),
                ("memory limit", "-" if options.limit_bytes is None else format_bytes(options.limit_bytes)),
                ("optimizer", f"{name}, {self.updates.order.value}"),
                ("trained on this rank", f"{len(self.updates.parameters)} parameters, {format_bytes(held)}"),
                ("this rank reads of a batch", read),
            ],
        )
