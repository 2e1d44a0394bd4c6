"""The step that a training loop calls, whatever kind of plan it is of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.common.units import format_bytes, format_seconds
from planner.layers.plan.document import LayerPlan
from planner.plan.document import Plan
from planner.plan.rendering import html_table, text_table
from runtime.library.batch import Batch, BatchShares
from runtime.library.checkpoint import load_checkpoint, save_checkpoint, wait_for_checkpoint
from runtime.library.export import export
from runtime.library.optimizers.user import UserOptimizer
from runtime.library.sources import ModelTensor
from runtime.measure.local_shards import Block


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


class Step(ABC):
    """A training step as a plan says, made by :func:`runtime.load`; every method is a collective of all ranks.

    Attributes
    ----------
    plan, device
        The plan, and the device of this rank.
    optimizer
        The torch optimizer over this rank's shards: learning-rate schedulers take it.
    module
        The module, whose parameters and buffers are DTensors under the plan's placements.
    shares
        Which part of a batch this rank reads.
    peak_bytes
        Predicted peak of this rank with its optimizer; 0 where the plan predicts none.
    state, blocks
        Local parameters and buffers of this rank, and their places in the model; by the rank's own names.
    model
        Parameters and buffers of the model by first name.
    saved_names
        First name of each tensor of the model's ``state_dict``.
    saving
        A checkpoint that is being written, and its end.
    """

    def __init__(
        self,
        plan: Plan | LayerPlan,
        module: nn.Module,
        device: torch.device,
        shares: BatchShares,
        updates: UserOptimizer,
        state: Mapping[str, Tensor],
        blocks: Mapping[str, Block],
        model: Iterable[ModelTensor],
        saved_names: Mapping[str, str],
        peak_bytes: int,
    ) -> None:
        self.plan, self.module, self.device, self.shares = plan, module, device, shares
        self.updates = updates
        self.optimizer: torch.optim.Optimizer = updates.torch
        self.state, self.blocks = state, blocks
        self.model = {tensor.name: tensor for tensor in model}
        self.saved_names = saved_names
        self.peak_bytes = peak_bytes
        self.saving: tuple[Path, Future[Any]] | None = None

    @abstractmethod
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

    @abstractmethod
    def evaluate(self, batch: Batch) -> Tensor:
        """Loss of a batch by the forward alone: without dropout, batch norms by their running statistics."""

    @property
    @abstractmethod
    def plan_name(self) -> str:
        """What the plan is known by, in checkpoints."""

    @abstractmethod
    def _described(self) -> tuple[str, str, float | None, int | None]:
        """Model, devices, predicted seconds of a step, and the limit of memory."""

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

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers as DTensors, by the module's names; they share the step's memory."""
        return dict(self.module.state_dict())

    def save(
        self,
        folder: Path | str,
        scheduler: Any | None = None,
        position: Mapping[str, Any] | None = None,
        keep: int | None = None,
        wait: bool = True,
    ) -> Path:
        """Write a checkpoint; as :func:`runtime.library.checkpoint.save_checkpoint`."""
        return save_checkpoint(self, folder, scheduler, position, keep, wait)

    def wait_for_save(self) -> None:
        """Wait for a checkpoint that is being written; as :func:`runtime.library.checkpoint.wait_for_checkpoint`."""
        wait_for_checkpoint(self)

    def resume(self, path: Path | str, scheduler: Any | None = None) -> dict[str, Any]:
        """Continue from a checkpoint; as :func:`runtime.library.checkpoint.load_checkpoint`."""
        return load_checkpoint(self, path, scheduler)

    def export(self, path: Path | str) -> Path:
        """Write whole weights into one safetensors file; as :func:`runtime.library.export.export`."""
        return export(self, path)

    def summary(self) -> Summary:
        """Main figures."""
        model, devices, seconds, limit = self._described()
        predicted = "-" if seconds is None else format_seconds(seconds)
        peak = format_bytes(self.peak_bytes) if self.peak_bytes else "-"
        held = sum(parameter.nbytes for parameter in self.updates.parameters.values())
        rows = self.shares.rows
        read = f"rows {rows.start} to {rows.stop - 1} of {self.shares.batch_size}" if rows else "all"
        return Summary(
            f"<step of {model} on {devices}: {predicted} predicted, peak {peak}, {self.steps} steps taken>",
            [
                ("model", model),
                ("devices", f"{devices}; this rank on {self.device}"),
                ("steps taken", str(self.steps)),
                ("predicted step", predicted),
                ("predicted peak", peak),
                ("memory limit", "-" if limit is None else format_bytes(limit)),
                ("optimizer", f"{type(self.optimizer).__name__}, {self.updates.order.value}"),
                ("trained on this rank", f"{len(self.updates.parameters)} parameters, {format_bytes(held)}"),
                ("this rank reads of a batch", read),
            ],
        )
