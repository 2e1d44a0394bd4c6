"""Training steps of a layer plan on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from planner.layers.plan.document import LayerPlan, LayerSettings
from planner.torch_adapter.meters.storage_meter import counted_on_host
from runtime.job.watchdog import item_of, wait_for, watched
from runtime.layers.executor import BuiltStage, build_stage
from runtime.layers.families.units import IGNORED_LABEL, ModelFamily
from runtime.layers.memory import HostState
from runtime.layers.mesh import PlanMeshes
from runtime.layers.pipeline import OneStage, Pipeline
from runtime.layers.uneven_pipeline import UnevenPipeline
from runtime.measure.host_copies import HostCopies
from runtime.measure.initial_state import copied
from runtime.measure.local_shards import BlockReader, local_tensor
from runtime.measure.memory_meter import MemoryMeter
from runtime.measure.optimizer import LocalOptimizer, ShardOptimizer
from runtime.measure.out_of_memory import is_out_of_memory, note_rank_memory

_SEED_STRIDE = 1_000_003
"""Distance in seeds between two steps' random numbers, and between two ranks'."""


class LayerTraining:
    """One rank's part of the training.

    A rank's rows of the batch are one block of it; a micro-batch has some rows of every rank.

    Parameters
    ----------
    plan
        A checked plan.
    family, model
        The model, its parameters without storage, and its units.
    meshes
        Meshes of this rank.
    read
        The model's initial parameters and buffers.
    device
        Device of the rank.
    optimizer
        Makes the optimizer for this rank's stage and the local parts of its trained parameters by path; None: the
        plan's.

    Attributes
    ----------
    stage
        This rank's stage.
    optimizer
        Its optimizer, by path of the parameter.
    share
        Number of this rank's block of the batch, and of blocks in all.
    """

    def __init__(
        self,
        plan: LayerPlan,
        family: ModelFamily,
        model: nn.Module,
        meshes: PlanMeshes,
        read: BlockReader,
        device: torch.device,
        optimizer: Callable[[BuiltStage, Mapping[str, Tensor]], ShardOptimizer] | None = None,
    ) -> None:
        self._plan, self._family, self._meshes, self._device = plan, family, meshes, device
        self.stage = build_stage(plan, family, model, meshes, read)
        self._counted: Tensor | int = 1
        self._scale = 1.0
        self._schedule: OneStage | Pipeline | UnevenPipeline
        if meshes.stages == 1:
            self._schedule = OneStage(self.stage, plan.micro_batches, self._loss)
        elif not meshes.is_even:
            self._schedule = UnevenPipeline(plan, self.stage, meshes, device, self._loss)
        else:
            group = meshes.pipeline_group
            self._schedule = Pipeline(plan, self.stage, meshes.stage, group, device, self._loss)
        blocks = min(self.stage.first.data_parallel, self.stage.last.data_parallel) if meshes.is_even else 1
        self.share = meshes.rank_in_stage * blocks // meshes.sizes[meshes.stage], blocks
        self._most_parallel = max(layer.data_parallel for layer in plan.layers)
        trained = {path: p for path, p in self.stage.module.named_parameters() if p.requires_grad}
        offloaded = {path for path in trained if self.stage.layers[path].offload_optimizer}
        local = {path: local_tensor(parameter) for path, parameter in trained.items()}
        self.optimizer: ShardOptimizer = (
            LocalOptimizer(plan.optimizer, local) if optimizer is None else optimizer(self.stage, local)
        )
        self._host_state = HostState(self.optimizer, offloaded, HostCopies(device))

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
                kept += self.optimizer.state_of(path).values()
        return kept

    @watched("step")
    def step(
        self,
        batch: Mapping[str, Tensor],
        meter: MemoryMeter | None = None,
        on_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> float:
        """As :meth:`runtime.measure.steps.Training.step`."""
        number, blocks = self.share
        rows = {name: tensor.chunk(blocks)[number] for name, tensor in batch.items()}
        return item_of(self.run(rows, meter, on_gradients))

    @contextmanager
    def _memory_noted(self) -> Iterator[None]:
        """Note on an allocator's error what was alive beside what the plan said of this stage."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            record = self._plan.record
            if is_out_of_memory(error) and record is not None and record.engine_peaks:
                peak = record.engine_peaks[self._meshes.stage]
                planned = peak.states, peak.gradients, peak.nbytes - peak.states - peak.gradients
                gradients = [p.grad for p in self.parameters().values() if p.grad is not None]
                where = f"step {self.optimizer.step_count + 1} of stage {self._meshes.stage}"
                note_rank_memory(error, where, self.resident_tensors(), gradients, planned, self._device)
            raise

    @watched("step")
    def run(
        self,
        rows: Mapping[str, Tensor],
        meter: MemoryMeter | None = None,
        on_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """As :meth:`step`, from this rank's rows of the batch; the loss is a tensor, which is not waited for.

        Gradients are multiplied by ``scale``, which the optimizer then divides by.
        """
        with self._memory_noted():
            return self._run(rows, meter, on_gradients, scale)

    def _run(
        self,
        rows: Mapping[str, Tensor],
        meter: MemoryMeter | None,
        on_gradients: Callable[[Mapping[str, Tensor]], None] | None,
        scale: float,
    ) -> Tensor:
        self._scale = scale
        number = self.optimizer.step_count
        if meter is not None and number == 0:
            # Operators touch them in place: they must be known as the host's before.
            with counted_on_host(), meter.metering(*self._kept(on_host=True)):
                pass
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed((self._plan.seed + number * _SEED_STRIDE + dist.get_rank()) % 2**62)
            inputs, targets = self._own(rows)
            with nullcontext() if meter is None else meter.metering(*inputs, targets):
                with self.stage.hidden.step():
                    part = self._schedule.step(inputs, targets)
                self._add_gradients_of_other_stage()
        loss = self._whole_loss(part)
        parameters = self.parameters()
        gradients = {path: p.grad for path, p in parameters.items() if p.grad is not None}
        if on_gradients is not None:
            on_gradients(gradients)
        gradients.clear()
        with nullcontext() if meter is None else meter.metering():
            self.optimizer.begin_step()
            for path, parameter in parameters.items():
                if parameter.grad is not None:
                    gradient, parameter.grad = local_tensor(parameter.grad), None
                    with self._host_state.on_device(path):
                        self.optimizer.update(path, gradient)
                    del gradient
            self.optimizer.end_step()
        return loss

    @watched("evaluation")
    def evaluate(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Loss of a batch by the forward alone, in the modules' evaluation mode, from this rank's rows."""
        self._scale = 1.0
        inputs, targets = self._own(rows)
        self.stage.module.eval()
        try:
            with torch.no_grad():
                part = self._schedule.evaluate(inputs, targets)
        finally:
            self.stage.module.train()
            for module in self.stage.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # what was gathered is of parameters before the next update
        return self._whole_loss(part)

    def _own(self, rows: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Inputs and targets of this rank, micro-batch after micro-batch; counts those of all ranks."""
        targets = self._family.targets(rows)
        counted = (targets != IGNORED_LABEL).sum().to(self._device)
        dist.all_reduce(counted)
        _, blocks = self.share
        self._counted = counted * blocks / dist.get_world_size()  # every block is on as many ranks
        inputs = tuple(self._micro_batches(tensor, self.stage.first) for tensor in self._family.inputs(rows))
        return inputs, self._micro_batches(targets, self.stage.last)

    def _micro_batches(self, rows: Tensor, layer: LayerSettings) -> Tensor:
        """Rows of this rank in a layer, micro-batch after micro-batch.

        The batch is cut into as many blocks as the most parallel layer has ranks, and each of them into micro-batches:
        so a rank of any layer has the same rows of a micro-batch as those of its blocks.
        """
        _, blocks = self.share
        parts = layer.data_parallel // blocks
        rank = self._meshes.rank_in_stage // layer.tensor_parallel % parts
        own = rows.chunk(parts)[rank]
        cut = own.view(self._most_parallel // layer.data_parallel, self._plan.micro_batches, -1, *own.shape[1:])
        return copied(cut.transpose(0, 1).flatten(0, 2), self._device)

    def _whole_loss(self, part: Tensor) -> Tensor:
        # Devices that share the last layer's products have the same rows, and the same loss.
        total = part.double() / (self.stage.last.tensor_parallel * self._scale)
        dist.all_reduce(total)
        return total.float()

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Part of the whole batch's mean loss that these rows have."""
        if self._family.float_loss or logits.dtype is torch.float16:  # whose sums overflow
            logits = logits.float()
        flat = logits.reshape(-1, logits.shape[-1])
        total = nn.functional.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum")
        return total * self._scale / self._counted if self._scale != 1.0 else total / self._counted

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
            peer = self._meshes.ranks_of(stage)[self._meshes.rank_in_stage]
            exchange = [dist.P2POp(dist.isend, own.clone(), peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(exchange):
                wait_for(work)
            own += received
