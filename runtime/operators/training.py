"""Training steps on one rank: local tensors in, a lowered step, the optimizer, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from planner.graph.operator_graph import ValueRole
from planner.graph.placement import Placement
from planner.schedule.instructions import Schedule
from planner.strategies.traced_step import TracedStep
from planner.torch_adapter.local.collectives import MeshGroups
from runtime.job.watchdog import item_of, watched
from runtime.measure.initial_state import copied
from runtime.measure.local_shards import local_block
from runtime.measure.memory_meter import MemoryMeter
from runtime.measure.optimizer import MASTER, LocalOptimizer, ShardOptimizer
from runtime.operators.executor import lower
from runtime.operators.instruction_clock import InstructionClock
from runtime.operators.memory_account import memory_noted

_SEED_STRIDE = 1_000_003
"""Distance in seeds between two runs' random numbers, so that their steps do not share any."""

_KEPT_ROLES = (ValueRole.PARAMETER, ValueRole.BUFFER)


@dataclass(frozen=True, slots=True)
class _Input:
    """An input of the graph: its name, role, placement and dtype."""

    name: str
    role: ValueRole
    placement: Placement
    shape: tuple[int, ...]
    dtype: torch.dtype


class LocalTraining:
    """One rank's part of the training.

    Parameters
    ----------
    traced, schedule
        The step and how to run it.
    groups
        Mesh and process groups of this rank.
    state
        Local parameters, module buffers and constants by name; trained in place.
    optimizer
        Name of the optimizer, whose state is allocated here, before the first step; or a function that makes one for
        the local shards of the parameters that the schedule updates, by name.
    seed
        Key of random operators.
    device
        Where the local tensors are.
    clock
        Times every instruction of every step.
    micro_batches
        Of a batch of :meth:`step`.
    fused
        Whether AdamW is one kernel, where ``optimizer`` is a name.

    Attributes
    ----------
    placements
        Placement of each parameter and module buffer by name.
    state, optimizer
        Values that change from step to step.
    """

    def __init__(
        self,
        traced: TracedStep,
        schedule: Schedule,
        groups: MeshGroups,
        state: Mapping[str, Tensor],
        optimizer: str | Callable[[Mapping[str, Tensor]], ShardOptimizer],
        seed: int,
        device: torch.device,
        clock: InstructionClock | None = None,
        micro_batches: int = 1,
        fused: bool = True,
    ) -> None:
        graph = traced.graph
        self._micro_batches = micro_batches
        self._seed = seed
        self._step_seed = torch.zeros((), dtype=torch.int64, device=device)
        self._groups = groups
        self._device = device
        self._clock = clock
        self._lowered = lower(schedule, traced, groups, self._step_seed, device, clock)
        self._inputs = tuple(
            _Input(
                graph.values[value].name,
                graph.values[value].role,
                schedule.buffers[buffer].placement,
                graph.values[value].spec.shape,
                getattr(torch, graph.values[value].spec.dtype),
            )
            for value, buffer in zip(graph.inputs, schedule.inputs, strict=True)
        )
        self.placements = {entry.name: entry.placement for entry in self._inputs if entry.role in _KEPT_ROLES}
        self.state = dict(state)
        trained = {name: self.state[name] for name in self._lowered.end.updated}
        self.optimizer: ShardOptimizer = (
            LocalOptimizer(optimizer, trained, self._lowered.end.only_updates, fused)
            if isinstance(optimizer, str)
            else optimizer(trained)
        )
        self._input_buffers = schedule.inputs
        spec = self.optimizer.spec
        self._memory_noted = partial(memory_noted, graph, schedule, self._lowered, spec, self._resident, device)

    def _resident(self) -> tuple[dict[int, Tensor], list[Tensor]]:
        """Parameters and module buffers by the schedule's buffer, and the optimizer's state."""
        named = zip(self._input_buffers, self._inputs, strict=True)
        kept = {buffer: self.state[entry.name] for buffer, entry in named if entry.name in self.state}
        return kept, self.optimizer.state_tensors()

    def resident_tensors(self) -> list[Tensor]:
        """Tensors that live between steps: parameters, module buffers, optimizer state."""
        return [*self.state.values(), *self.optimizer.state_tensors()]

    @watched("step")
    def step(
        self,
        batch: Mapping[str, Tensor],
        meter: MemoryMeter | None = None,
        on_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> float:
        """As :meth:`runtime.measure.steps.Training.step`; tensors of several micro-batches are stacked."""
        if self._micro_batches == 1:
            return item_of(self.run(self.blocks(batch), meter, on_gradients))
        parts = [self.blocks({name: tensor[at] for name, tensor in batch.items()}) for at in range(self._micro_batches)]
        return item_of(self.run_micro_batches(parts, on_gradients, meter=meter))

    def blocks(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views of this rank's blocks of a batch's global tensors, by name."""
        return {
            entry.name: local_block(batch[entry.name], entry.placement, self._groups.shape, self._groups.coordinate)
            for entry in self._inputs
            if entry.role is ValueRole.INPUT
        }

    @watched("step")
    def run(
        self,
        blocks: Mapping[str, Tensor],
        meter: MemoryMeter | None = None,
        on_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """As :meth:`step`, from this rank's blocks of the batch; the loss is a tensor, which is not waited for.

        Gradients are multiplied by ``scale``, which the optimizer then divides by.
        """
        number = self.optimizer.step_count
        self._step_seed.fill_((self._seed * _SEED_STRIDE + number) % 2**62)
        inputs = self._local_inputs(blocks, scale)
        if self._clock is not None:
            self._clock.begin()
        with self._memory_noted(inputs), _watching(meter, inputs):
            result = self._lowered.begin(inputs)
        with self._memory_noted(inputs), _watching(meter, ()):
            self.optimizer.begin_step()
            if on_gradients is None:
                self._lowered.end.run(result.carried, self.optimizer.update)
                gradients = {}
            else:
                gradients = self._lowered.end.gradients(result.carried)
        if on_gradients is not None:
            on_gradients(gradients)
        with _watching(meter, ()):
            for name in list(gradients):
                self.optimizer.update(name, gradients.pop(name))
            self.optimizer.end_step()
            for name, updated in result.buffer_updates.items():
                self.state[name].copy_(updated)
        if self._clock is not None:
            self._clock.end()
        return result.loss

    @watched("step")
    def run_micro_batches(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        on_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
        scale: float = 1.0,
        meter: MemoryMeter | None = None,
    ) -> Tensor:
        """As :meth:`run`, with the mean of the micro-batches' losses and gradients.

        The sums of gradients live until the updates, which are where the schedule has them, in the last micro-batch.
        """
        number, count = self.optimizer.step_count, len(micro_batches)
        sums = dict[str, Tensor]()
        total = torch.zeros((), device=self._device)

        def add(name: str, gradient: Tensor) -> None:
            if name in sums:
                sums[name].add_(gradient)
            else:
                wide = MASTER in self.optimizer.state_of(name)
                sums[name] = gradient.to(torch.float32 if wide else self.state[name].dtype, copy=True)

        def update(name: str, gradient: Tensor) -> None:
            add(name, gradient)
            self.optimizer.update(name, sums.pop(name))

        for at, blocks in enumerate(micro_batches):
            self._step_seed.fill_((self._seed * _SEED_STRIDE + number * count + at) % 2**62)
            inputs = self._local_inputs(blocks, scale / count)
            with self._memory_noted(inputs), _watching(meter, inputs):
                result = self._lowered.begin(inputs)
            inputs.clear()
            ends = at == count - 1 and on_gradients is None
            with self._memory_noted(), _watching(meter, ()):
                if ends:
                    self.optimizer.begin_step()
                self._lowered.end.run(result.carried, update if ends else add)
                for name, updated in result.buffer_updates.items():
                    self.state[name].copy_(updated)
            total += result.loss.detach()
            del result
        if on_gradients is not None:
            on_gradients(sums)
            with _watching(meter, ()):
                self.optimizer.begin_step()
                for name in list(sums):
                    self.optimizer.update(name, sums.pop(name))
        with _watching(meter, ()):
            self.optimizer.end_step()
        return total / count

    def _local_inputs(self, blocks: Mapping[str, Tensor], scale: float) -> list[Tensor]:
        tensors = []
        for entry in self._inputs:
            if entry.role is ValueRole.TANGENT:
                tensors.append(torch.full(entry.shape, scale, dtype=entry.dtype, device=self._device))
            elif entry.role is ValueRole.INPUT:
                tensors.append(copied(blocks[entry.name], self._device))
            else:
                tensors.append(self.state[entry.name])
        return tensors


def _watching(meter: MemoryMeter | None, inputs: Iterable[Tensor]) -> AbstractContextManager[None]:
    return nullcontext() if meter is None else meter.metering(*inputs)
