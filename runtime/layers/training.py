"""Training steps of a layer plan on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.layers.plan.document import LayerPlan, LayerSettings
from planner.torch_adapter.meters.storage_meter import counted_on_host
from runtime.layers.executor import build_stage
from runtime.layers.families.units import IGNORED_LABEL, ModelFamily
from runtime.layers.memory import LayerOptimizer, local_tensor
from runtime.layers.mesh import PlanMeshes
from runtime.layers.pipeline import OneStage, Pipeline
from runtime.measure.host_copies import HostCopies
from runtime.measure.initial_state import copied
from runtime.measure.memory_meter import MemoryMeter

_SEED_STRIDE = 1_000_003
"""Distance in seeds between two steps' random numbers, and between two ranks'."""


class LayerTraining:
    """One rank's part of the training.

    Parameters
    ----------
    plan
        A checked plan.
    family, model
        The model without storage, and its units.
    meshes
        Meshes of this rank.
    state
        The model's initial parameters and buffers by name.
    device
        Device of the rank.

    Attributes
    ----------
    stage
        This rank's stage.
    optimizer
        Its optimizer, by path of the parameter.
    """

    def __init__(
        self,
        plan: LayerPlan,
        family: ModelFamily,
        model: nn.Module,
        meshes: PlanMeshes,
        state: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._plan, self._family, self._meshes, self._device = plan, family, meshes, device
        self.stage = build_stage(plan, family, model, meshes, state)
        self._counted = 1
        self._schedule: OneStage | Pipeline
        if meshes.stages == 1:
            self._schedule = OneStage(self.stage, plan.micro_batches, self._loss)
        else:
            group = meshes.pipeline_group
            self._schedule = Pipeline(plan, self.stage, meshes.stage, group, device, self._loss)
        trained = {path: p for path, p in self.stage.module.named_parameters() if p.requires_grad}
        offloaded = {path for path in trained if self.stage.layers[path].offload_optimizer}
        local = {path: local_tensor(parameter) for path, parameter in trained.items()}
        self.optimizer = LayerOptimizer(plan.optimizer, local, offloaded, HostCopies(device))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of this rank by path."""
        return dict(self.stage.module.named_parameters())

    def resident_tensors(self) -> list[Tensor]:
        """Tensors that live on the device between steps: parameters, buffers, optimizer state."""
        return [*self._kept(on_host=False), *self.stage.module.buffers()]

    def _kept(self, on_host: bool) -> list[Tensor]:
        """Parameters and optimizer state on the host, or those on the device."""
        kept: list[Tensor] = []
        for path, parameter in self.parameters().items():
            layer = self.stage.layers[path]
            if layer.offload_parameters == on_host:
                kept.append(local_tensor(parameter))
            if (layer.offload_parameters or layer.offload_optimizer) == on_host and parameter.requires_grad:
                kept += self.optimizer.state(path)
        return kept

    def step(
        self,
        batch: Mapping[str, Tensor],
        meter: MemoryMeter | None = None,
        on_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> float:
        """As :meth:`runtime.measure.steps.Training.step`."""
        number = self.optimizer.step_count
        if meter is not None and number == 0:
            # Operators touch them in place: they must be known as the host's before.
            with counted_on_host(), meter.metering(*self._kept(on_host=True)):
                pass
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed((self._plan.seed + number * _SEED_STRIDE + dist.get_rank()) % 2**62)
            loss = self._forward_and_backward(batch, meter)
        parameters = self.parameters()
        gradients = {path: p.grad for path, p in parameters.items() if p.grad is not None}
        if on_gradients is not None:
            on_gradients(gradients)
        gradients.clear()
        with nullcontext() if meter is None else meter.metering():
            self.optimizer.begin_step()
            for path, parameter in parameters.items():
                if parameter.grad is not None:
                    self.optimizer.update(path, local_tensor(parameter.grad))
                    parameter.grad = None
        return loss

    def _forward_and_backward(self, batch: Mapping[str, Tensor], meter: MemoryMeter | None) -> float:
        targets = self._family.targets(batch)
        self._counted = int((targets != IGNORED_LABEL).sum())
        inputs = tuple(self._rows(tensor, self.stage.first) for tensor in self._family.inputs(batch))
        own_targets = self._rows(targets, self.stage.last)
        with nullcontext() if meter is None else meter.metering(*inputs, own_targets):
            part = self._schedule.step(inputs, own_targets)
            self._add_gradients_of_other_stage()
        # Devices that share the last layer's products have the same rows, and the same loss.
        total = part.double() / self.stage.last.tensor_parallel
        dist.all_reduce(total)
        return total.item()

    def _rows(self, tensor: Tensor, layer: LayerSettings) -> Tensor:
        """Rows of this rank of every micro-batch, one after the other."""
        rank = self._meshes.rank_in_stage // layer.tensor_parallel
        parts = [part.chunk(layer.data_parallel)[rank] for part in tensor.chunk(self._plan.micro_batches)]
        return copied(torch.cat(parts), self._device)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Part of the whole batch's mean loss that these rows have."""
        if self._family.float_loss:
            logits = logits.float()
        flat = logits.reshape(-1, logits.shape[-1])
        total = nn.functional.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum")
        return total / self._counted

    def _add_gradients_of_other_stage(self) -> None:
        """Sum the gradients of parameters that another stage holds too, so that both copies are trained alike."""
        parameters = self.parameters()
        for path, stage in sorted(self.stage.shared_with.items()):
            if path not in parameters:
                continue  # another path of a parameter that is tied within the stage
            gradient = parameters[path].grad
            assert gradient is not None
            own = local_tensor(gradient)
            received = torch.empty_like(own)
            peer = self._meshes.rank_in_stage + stage * self._plan.stage_devices
            exchange = [dist.P2POp(dist.isend, own.clone(), peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            own += received
