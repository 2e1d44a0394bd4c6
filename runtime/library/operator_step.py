"""The step of a plan of operators."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from planner.graph.operator_graph import ValueRole
from planner.plan.document import Plan
from planner.schedule.instructions import Schedule
from planner.strategies.traced_step import TracedStep
from planner.torch_adapter.local.collectives import MeshGroups
from runtime.job.watchdog import watched
from runtime.library.batch import Batch, BatchShares
from runtime.library.evaluation import evaluation_step
from runtime.library.optimizers.user import UserOptimizer
from runtime.library.sources import ModelTensor
from runtime.library.step import Step
from runtime.measure.initial_state import copied
from runtime.measure.local_shards import Block, block_slices
from runtime.operators.executor import LoweredStep, lower
from runtime.operators.training import LocalTraining


class OperatorStep(Step):
    """The step of a plan of operators.

    Attributes
    ----------
    groups
        Process groups of the job.
    training
        What runs it.
    """

    plan: Plan

    def __init__(
        self,
        plan: Plan,
        module: nn.Module,
        traced: TracedStep,
        schedule: Schedule,
        training: LocalTraining,
        groups: MeshGroups,
        device: torch.device,
        shares: BatchShares,
        saved_names: Mapping[str, str],
        peak_bytes: int,
    ) -> None:
        self._traced, self._schedule, self.groups, self.training = traced, schedule, groups, training
        values = {value.name: value for value in (traced.graph.values[at] for at in traced.graph.inputs)}
        self._shapes = {name: value.spec.shape for name, value in values.items()}
        state = {name: tensor for name, tensor in training.state.items() if name not in traced.constants}
        model = [
            ModelTensor(name, values[name].aliases, self._shapes[name], values[name].role is ValueRole.BUFFER)
            for name in state
        ]
        assert isinstance(training.optimizer, UserOptimizer)
        super().__init__(
            plan,
            module,
            device,
            shares,
            training.optimizer,
            state,
            {name: self._block(name) for name in state},
            model,
            saved_names,
            peak_bytes,
        )

    def _block(self, name: str) -> Block:
        shape = self._shapes[name]
        slices = block_slices(shape, self.training.placements[name], self.groups.shape, self.groups.coordinate)
        return Block(name, shape, tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))

    def __call__(self, batch: Batch) -> Tensor:
        """As :meth:`Step.__call__`."""
        parts, on_gradients = self.shares.micro_batches(batch), self.updates.on_gradients
        if len(parts) > 1:
            return self.training.run_micro_batches(parts, on_gradients, self.updates.loss_scale)
        return self.training.run(parts[0], on_gradients=on_gradients, scale=self.updates.loss_scale)

    @watched("evaluation")
    def evaluate(self, batch: Batch) -> Tensor:
        """As :meth:`Step.evaluate`.

        What else a module does in training mode only (branches on ``self.training``) stays as it was traced.
        """
        losses = [self._evaluated(blocks) for blocks in self.shares.micro_batches(batch)]
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def _evaluated(self, blocks: Mapping[str, Tensor]) -> Tensor:
        lowered, roles = self._forward
        inputs = [
            self.training.state[name]
            if role in (ValueRole.PARAMETER, ValueRole.BUFFER)
            else copied(blocks[name], self.device)
            if role is ValueRole.INPUT
            else torch.ones(self._shapes[name], device=self.device)
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
    def plan_name(self) -> str:
        """As :attr:`Step.plan_name`."""
        return self.plan.digest

    def _described(self) -> tuple[str, str, float | None, int | None]:
        options = self.plan.decision.options
        mesh = "x".join(map(str, options.mesh))
        return self.plan.decision.model.source, mesh, self.plan.objective_seconds, options.limit_bytes
