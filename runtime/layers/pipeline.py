"""Micro-batches through the stages of a layer plan: torch's pipeline schedules, or one stage by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from planner.layers.plan.document import LayerPlan
from runtime.layers.executor import BuiltStage
from runtime.layers.sharding import free_after_backward

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Part of the whole batch's loss that some rows have, of their logits and targets."""


class OneStage:
    """The schedule of a plan without a pipeline: a micro-batch's backward follows its forward.

    Parameters
    ----------
    stage
        The stage.
    micro_batches
        Number of micro-batches.
    loss
        Loss of a micro-batch.
    """

    def __init__(self, stage: BuiltStage, micro_batches: int, loss: LossFunction) -> None:
        self._stage = stage
        self._micro_batches = micro_batches
        self._loss = loss

    def step(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """Forward and backward of all micro-batches; gradients are reduced in the last backward.

        Parameters
        ----------
        inputs, targets
            This rank's rows, micro-batch after micro-batch.

        Returns
        -------
        Tensor
            Sum of the losses.
        """
        engine = cast(FSDPModule, self._stage.module)
        parts = list(zip(*(tensor.chunk(self._micro_batches) for tensor in inputs), strict=True))
        losses = []
        for number, (part, wanted) in enumerate(zip(parts, targets.chunk(self._micro_batches), strict=True)):
            is_last = number == self._micro_batches - 1
            engine.set_is_last_backward(is_last)
            engine.set_requires_gradient_sync(is_last)
            free_after_backward(self._stage.gathered_once, is_last)
            loss = self._loss(self._stage.module(*part), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def evaluate(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """Sum of the losses by the forward alone; see :meth:`step`."""
        parts = zip(*(tensor.chunk(self._micro_batches) for tensor in inputs), strict=True)
        wanted = targets.chunk(self._micro_batches)
        losses = [self._loss(self._stage.module(*part), own) for part, own in zip(parts, wanted, strict=True)]
        return torch.stack(losses).sum()


class Pipeline:
    """One stage of several, run by torch's schedule.

    Torch would keep every layer's gathered parameters from its first backward to that of the last micro-batch, as
    ZeRO-2 does; here layers that are not ZeRO-2 free them after every backward.

    Parameters
    ----------
    plan
        The plan.
    stage
        This rank's stage.
    position
        Position of the stage.
    group
        The ranks at this rank's place in every stage.
    device
        Device of the rank.
    loss
        Loss of a micro-batch.
    """

    def __init__(
        self,
        plan: LayerPlan,
        stage: BuiltStage,
        position: int,
        group: dist.ProcessGroup,
        device: torch.device,
        loss: LossFunction,
    ) -> None:
        self._is_first, self._is_last = position == 0, position == len(plan.stages) - 1

        def set_reshard_after_backward(freed: bool, *, recurse: bool = True) -> None:
            free_after_backward(stage.gathered_once, freed)

        stage.module.set_reshard_after_backward = set_reshard_after_backward  # type: ignore[assignment]
        made = PipelineStage(stage.module, position, len(plan.stages), device, group=group)
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[plan.schedule]
        self._schedule = kind(made, n_microbatches=plan.micro_batches, loss_fn=loss, scale_grads=False)

    def step(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """Forward and backward of all micro-batches; see :meth:`OneStage.step`.

        The first stage uses the inputs alone, the last the targets; the loss of the others is 0.
        """
        return self._run(self._schedule.step, inputs, targets)

    def evaluate(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """Sum of the losses by the forward alone; see :meth:`step`."""
        return self._run(self._schedule.eval, inputs, targets)

    def _run(self, run: Callable[..., Any], inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": targets, "losses": losses} if self._is_last else {}
        run(*(inputs if self._is_first else ()), return_outputs=False, **given)
        return (
            torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=targets.device)
        )
