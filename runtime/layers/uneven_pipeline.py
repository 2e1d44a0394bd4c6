"""Micro-batches through stages with different numbers of devices.

Torch's pipelines join each rank to one rank of the next stage. Here every rank of a stage sends the rows that it has to
the ranks that need them: hidden states are divided among the devices of a stage by rows alone when they leave it, and
tensor-parallel devices have the same ones. The orders of forwards and backwards are those of torch's schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from planner.layers.plan.document import LayerPlan, LayerSettings
from runtime.job.watchdog import wait_for
from runtime.layers.executor import BuiltStage
from runtime.layers.mesh import PlanMeshes
from runtime.layers.pipeline import LossFunction
from runtime.layers.sharding import free_after_backward


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows of a micro-batch, a half-open range, from a place in one stage to a place in another."""

    source: int
    target: int
    first: int
    end: int


def transfers(rows: int, source: LayerSettings, target: LayerSettings) -> tuple[Transfer, ...]:
    """Which place of a stage sends which rows to which place of the next one.

    Parameters
    ----------
    rows
        Rows of a micro-batch over all devices of a stage.
    source, target
        Settings of the layers on both sides: rows are divided by data parallelism, on the outer axis.
    """
    given, taken = rows // source.data_parallel, rows // target.data_parallel
    found = []
    for place in range(target.devices):
        first = place // target.tensor_parallel * taken
        replica = place % target.tensor_parallel % source.tensor_parallel
        for part in range(first // given, -(-(first + taken) // given)):
            begin, end = max(first, part * given), min(first + taken, (part + 1) * given)
            found.append(Transfer(part * source.tensor_parallel + replica, place, begin, end))
    return tuple(found)


def micro_batch_order(schedule: str, micro_batches: int, behind: int) -> Iterator[tuple[bool, int]]:
    """Forwards (True) and backwards of a stage with so many stages behind it, each with its micro-batch.

    GPipe runs all forwards first; 1F1B runs as many as there are stages from this one on, and then a backward ahead of
    every further forward.
    """
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, behind + 1)
    yield from ((True, number) for number in range(ahead))
    for number in range(micro_batches):
        yield False, number
        if number + ahead < micro_batches:
            yield True, number + ahead


@dataclass(frozen=True, slots=True)
class _Carried:
    """A tensor that is handed over: its shape but for the rows, its dtype, and whether it has a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


class _Border:
    """What passes between a stage and the next one; made by all ranks, used by those of the two stages."""

    def __init__(self, plan: LayerPlan, meshes: PlanMeshes, number: int, device: torch.device) -> None:
        source, target = plan.stages[number].layers[-1], plan.stages[number + 1].layers[0]
        rows = plan.model.batch // plan.micro_batches
        self._device = device
        self._ranks = meshes.ranks_of(number), meshes.ranks_of(number + 1)
        self._forward, self._backward = transfers(rows, source, target), transfers(rows, target, source)
        self._groups = _two_groups(tuple(rank for side in self._ranks for rank in side))
        self._carried: tuple[_Carried, ...] | None = None

    def hand_over(self, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Send the outputs of a stage; they must stay until the works are done."""
        self._agree([_Carried(tuple(t.shape[1:]), t.dtype, t.requires_grad) for t in tensors])
        mine = self._ranks[0].index(dist.get_rank())
        return self._send([tensor.detach() for tensor in tensors], self._forward, mine, self._ranks[1], 0)

    def take(self) -> tuple[Tensor, ...]:
        """Receive the inputs of a stage."""
        mine = self._ranks[1].index(dist.get_rank())
        found = self._receive(self._agree(None), self._forward, mine, self._ranks[0], 0)
        for tensor, carried in zip(found, self._agree(None), strict=True):
            tensor.requires_grad_(carried.has_gradient and torch.is_grad_enabled())
        return tuple(found)

    def hand_back(self, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Send the gradients of the inputs that have one; they must stay until the works are done."""
        mine = self._ranks[1].index(dist.get_rank())
        return self._send(tensors, self._backward, mine, self._ranks[0], 1)

    def take_back(self) -> list[Tensor]:
        """Receive the gradients of the outputs that have one."""
        mine = self._ranks[0].index(dist.get_rank())
        wanted = [carried for carried in self._agree(None) if carried.has_gradient]
        return self._receive(wanted, self._backward, mine, self._ranks[1], 1)

    def _agree(self, sent: list[_Carried] | None) -> tuple[_Carried, ...]:
        """Shapes and dtypes of what is handed over: the first sender tells all ranks of both stages, once."""
        if self._carried is None:
            received: list[list[_Carried] | None] = [sent]
            dist.broadcast_object_list(received, src=self._ranks[0][0], group=self._groups[0], device=self._device)
            assert received[0] is not None
            self._carried = tuple(received[0])
        return self._carried

    def _send(
        self, tensors: Sequence[Tensor], ways: Sequence[Transfer], mine: int, ranks: Sequence[int], group: int
    ) -> list[dist.Work]:
        own = [way for way in ways if way.source == mine]
        start = min(way.first for way in own) if own else 0
        operations = [
            dist.P2POp(
                dist.isend,
                tensor[way.first - start : way.end - start].contiguous(),
                ranks[way.target],
                self._groups[group],
            )
            for tensor in tensors
            for way in own
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def _receive(
        self, wanted: Sequence[_Carried], ways: Sequence[Transfer], mine: int, ranks: Sequence[int], group: int
    ) -> list[Tensor]:
        own = sorted((way for way in ways if way.target == mine), key=lambda way: way.first)
        parts = [
            [torch.empty((way.end - way.first, *one.shape), dtype=one.dtype, device=self._device) for way in own]
            for one in wanted
        ]
        operations = [
            dist.P2POp(dist.irecv, part, ranks[way.source], self._groups[group])
            for tensor in parts
            for part, way in zip(tensor, own, strict=True)
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            wait_for(work)
        return [tensor[0] if len(tensor) == 1 else torch.cat(tensor) for tensor in parts]


@cache
def _two_groups(ranks: tuple[int, ...]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A group for each direction, since calls of one group of NCCL run in the order in which they were made."""
    return dist.new_group(list(ranks)), dist.new_group(list(ranks))


class UnevenPipeline:
    """One stage of several that have different numbers of devices.

    Parameters
    ----------
    plan
        The plan.
    stage
        This rank's stage.
    meshes
        Meshes of this rank.
    device
        Device of the rank.
    loss
        Loss of a micro-batch.
    """

    def __init__(
        self, plan: LayerPlan, stage: BuiltStage, meshes: PlanMeshes, device: torch.device, loss: LossFunction
    ) -> None:
        self._plan, self._stage, self._loss, self._device = plan, stage, loss, device
        borders = [_Border(plan, meshes, number, device) for number in range(meshes.stages - 1)]
        self._before = borders[meshes.stage - 1] if meshes.stage else None
        self._after = borders[meshes.stage] if meshes.stage < len(borders) else None
        self._order = tuple(micro_batch_order(plan.schedule, plan.micro_batches, len(borders) - meshes.stage))

    def step(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """Forward and backward of all micro-batches; as :meth:`runtime.layers.pipeline.Pipeline.step`."""
        count = self._plan.micro_batches
        engine = cast(FSDPModule, self._stage.module)
        flying: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...], list[dist.Work]]] = {}
        sent: list[tuple[list[Tensor], list[dist.Work]]] = []
        losses = []
        for is_forward, number in self._order:
            if is_forward:
                given, made = self._forward(number, inputs, targets)
                if self._after is None:
                    losses.append(made[0].detach())
                flying[number] = given, made, [] if self._after is None else self._after.hand_over(made)
                continue
            given, made, works = flying.pop(number)
            is_last = number == count - 1
            engine.set_is_last_backward(is_last)
            engine.set_requires_gradient_sync(is_last)
            free_after_backward(self._stage.gathered_once, is_last)
            gradients = None if self._after is None else self._after.take_back()
            for work in works:
                wait_for(work)
            torch.autograd.backward([tensor for tensor in made if tensor.requires_grad], gradients)
            del made
            if self._before is not None:
                back = [cast(Tensor, tensor.grad) for tensor in given if tensor.requires_grad]
                sent.append((back, self._before.hand_back(back)))
        for _, works in sent:
            for work in works:
                wait_for(work)
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

    def evaluate(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """Sum of the losses by the forward alone; see :meth:`step`."""
        losses, works = [], []
        for number in range(self._plan.micro_batches):
            _, made = self._forward(number, inputs, targets)
            if self._after is None:
                losses.append(made[0])
            else:
                works.append((made, self._after.hand_over(made)))
        for _, waiting in works:
            for work in waiting:
                wait_for(work)
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

    def _forward(
        self, number: int, inputs: tuple[Tensor, ...], targets: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What a micro-batch is given, and what it makes: tensors for the next stage, or the loss."""
        count = self._plan.micro_batches
        own = tuple(tensor.chunk(count)[number] for tensor in inputs)
        given = own if self._before is None else self._before.take()
        made = self._stage.module(*given)
        if self._after is None:
            return given, (self._loss(made, targets.chunk(count)[number]),)
        return given, tuple(made)
