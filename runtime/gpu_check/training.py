"""Trainings in this process that are measured side by side: a plan's, and plain ones with torch's own means.

A plain training recomputes the first blocks of its model by ``torch.utils.checkpoint``, or is compiled. Both use the
plan's optimizer, of torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from planner.models.references import TrainingStep, load_step, reference_of
from planner.plan.document import Plan
from planner.schedule.instructions import Schedule
from planner.strategies.traced_step import TracedStep, trace_step
from planner.torch_adapter.local.collectives import MeshGroups
from planner.torch_adapter.tracing.step_module import StepArguments, step_loss
from runtime.gpu_check.plans import required
from runtime.measure.batches import Batches
from runtime.measure.initial_state import InitialState, local_state
from runtime.measure.memory_meter import MemoryMeter
from runtime.measure.optimizer import whole_model_optimizer
from runtime.measure.steps import Measurement, Training, train_and_measure
from runtime.operators.checked_plan import checked_schedule
from runtime.operators.instruction_clock import InstructionClock
from runtime.operators.training import LocalTraining

STEPS = 5
Compiler = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


def fresh_memory(device: torch.device) -> None:
    """Give back what earlier trainings held; peaks begin anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


class Subject:
    """A model with its batches, traced once for all plans of it.

    Parameters
    ----------
    plan
        One of its plans.
    device
        Where it trains.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.reference = reference_of(plan.decision.model)
        step = load_step(self.reference, "meta")
        self.traced: TracedStep = trace_step(
            step.module, step.example_args, step.example_kwargs, step.loss_fn, self.reference.reduce_dtype
        )
        self.groups = MeshGroups.of(init_device_mesh(device.type, (dist.get_world_size(),)))
        self._initial = load_step(self.reference, "cpu")
        self._schedules: dict[str, Schedule] = {}

    @classmethod
    @cache
    def named(cls, name: str, device: torch.device) -> Subject:
        """That of the free plan of a name; made once, since initial values take longer than steps."""
        return cls(required(name), device)

    def step(self) -> tuple[TrainingStep, Batches]:
        """A step with the initial values in host memory, and its batches; the same at each call."""
        step = replace(self._initial, module=deepcopy(self._initial.module))
        arguments = StepArguments.of(step.module, step.example_args, step.example_kwargs)
        return step, Batches.of(step.module, arguments, arguments.tensors, None)

    def schedule(self, plan: Plan) -> Schedule:
        """Schedule of a plan, replayed on the step as traced here."""
        if plan.digest not in self._schedules:
            self._schedules[plan.digest] = checked_schedule(plan, self.traced, dist.get_world_size())
        return self._schedules[plan.digest]

    def planned(self, plan: Plan, step: TrainingStep, clock: InstructionClock | None = None) -> LocalTraining:
        """Training by a plan from the values of a step."""
        schedule = self.schedule(plan)
        named = {**dict(step.module.named_parameters()), **dict(step.module.named_buffers())}
        values = InitialState({name: tensor.detach() for name, tensor in named.items()}, {})
        state = local_state(values, self.traced.constants, self.traced.graph, schedule, self.groups, self.device)
        options = plan.decision.options
        return LocalTraining(
            self.traced, schedule, self.groups, state, options.optimizer, plan.decision.model.seed, self.device, clock
        )

    def plain(self, step: TrainingStep, checkpointed: int = 0, compiled: Compiler | None = None) -> PlainTraining:
        """Training of the module itself on the device."""
        return PlainTraining(step, self.plan.decision.options.optimizer, self.device, checkpointed, compiled)

    def measure(self, make: Callable[[TrainingStep], Training]) -> Measurement:
        """Train from the initial values; what trained before is dropped, and peaks begin anew."""
        torch.compiler.reset()
        fresh_memory(self.device)
        step, batches = self.step()
        training = make(step)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return train_and_measure(training, batches, STEPS if self.device.type == "cuda" else 2, self.device)


class PlainTraining:
    """The module itself, torch's autograd and torch's optimizer; a :class:`~runtime.measure.steps.Training`.

    Parameters
    ----------
    step
        With initial values; its module is moved to the device and changed.
    optimizer
        A name of :data:`planner.graph.optimizers.OPTIMIZERS`.
    device
        Where it trains.
    checkpointed
        Blocks, from the first, whose activations are recomputed; of a module with a list ``blocks``.
    compiled
        Compiles the loss as a function of tensors; None: it is not compiled.
    """

    def __init__(
        self,
        step: TrainingStep,
        optimizer: str,
        device: torch.device,
        checkpointed: int = 0,
        compiled: Compiler | None = None,
    ) -> None:
        self._module, self._device = step.module.to(device), device
        self._arguments = StepArguments.of(step.module, step.example_args, step.example_kwargs)
        blocks: Any = getattr(step.module, "blocks", ())
        for at in range(checkpointed):
            blocks[at] = _Recomputed(blocks[at])
        if checkpointed and hasattr(step.module, "recompute_loss"):
            step.module.recompute_loss = True  # type: ignore[assignment]
        self._loss: Callable[..., Tensor] = self._plain_loss(step)
        self._optimizer = whole_model_optimizer(optimizer, step.module)
        if compiled is not None:
            self._loss = compiled(self._loss)
            tensors = [tensor.to(device) for tensor in self._arguments.tensors]
            self._loss(*tensors).backward()  # type: ignore[no-untyped-call]  # compiles outside of what is measured
            step.module.zero_grad(set_to_none=True)

    def _plain_loss(self, step: TrainingStep) -> Callable[..., Tensor]:
        def loss(*tensors: Tensor) -> Tensor:
            args, kwargs = self._arguments.rebuild(tensors)
            return step_loss(step.module, args, kwargs, step.loss_fn)

        return loss

    def resident_tensors(self) -> list[Tensor]:
        """As :meth:`runtime.measure.steps.Training.resident_tensors`; torch makes the optimizer's state later."""
        return [*self._module.parameters(), *self._module.buffers(), *self._masters()]

    def _masters(self) -> list[Tensor]:
        return [tensor for group in self._optimizer.param_groups for tensor in group["params"]]

    def step(
        self,
        batch: Mapping[str, Tensor],
        meter: MemoryMeter | None = None,
        on_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> float:
        """As :meth:`runtime.measure.steps.Training.step`."""
        tensors = [batch[name].to(self._device) for name in self._arguments.names]
        if meter is None:
            return self._step(tensors, on_gradients)
        with meter.metering(*tensors):
            return self._step(tensors, on_gradients)

    def _step(self, tensors: list[Tensor], on_gradients: Callable[[Mapping[str, Tensor]], None] | None) -> float:
        loss = self._loss(*tensors)
        loss.backward()  # type: ignore[no-untyped-call]
        if on_gradients is not None:
            named = self._module.named_parameters()
            on_gradients({name: tensor.grad for name, tensor in named if tensor.grad is not None})
        self._optimizer.step()
        self._module.zero_grad(set_to_none=True)
        return loss.item()


class _Recomputed(nn.Module):
    """A block whose activations are recomputed in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *tensors: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, *tensors, use_reentrant=False)
        return result
