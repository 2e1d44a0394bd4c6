"""The step of a plan of layers, on torch's own engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.graph.optimizers import OptimizerSpec, optimizer_named
from planner.graph.placement import shard
from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan
from planner.models.references import TrainingStep
from planner.plan.decision import canonical_json
from planner.torch_adapter.tracing.step_module import StepArguments
from runtime.layers.check import check_model
from runtime.layers.executor import BuiltStage
from runtime.layers.families.registry import model_family
from runtime.layers.mesh import plan_meshes
from runtime.layers.training import LayerTraining
from runtime.library.batch import Batch, BatchShares, BatchTensor
from runtime.library.errors import LoadError
from runtime.library.optimizers.memory import MeasuredOptimizer, check_excess, measured_optimizer
from runtime.library.optimizers.probe import OptimizerRefusedError, check_element_wise
from runtime.library.optimizers.user import Clipping, ShardNames, UpdateOrder, UserOptimizer, planned_optimizer
from runtime.library.sources import LoadOptions, ModelTensor, module_tensors, reader_without_module
from runtime.library.step import Step
from runtime.measure.local_shards import local_tensor


class LayerStep(Step):
    """The step of a plan of layers.

    Attributes
    ----------
    training
        What runs it.
    """

    plan: LayerPlan

    def __init__(
        self,
        plan: LayerPlan,
        module: nn.Module,
        training: LayerTraining,
        shares: BatchShares,
        model: Sequence[ModelTensor],
        saved_names: Mapping[str, str],
        device: torch.device,
        peak_bytes: int,
    ) -> None:
        self.training = training
        self._stage = training.stage.module
        tensors = (*self._stage.named_parameters(), *self._stage.named_buffers())
        state = {path: local_tensor(tensor) for path, tensor in tensors}
        assert isinstance(training.optimizer, UserOptimizer)
        super().__init__(
            plan,
            module,
            device,
            shares,
            training.optimizer,
            state,
            training.stage.blocks,
            model,
            saved_names,
            peak_bytes,
        )

    def __call__(self, batch: Batch) -> Tensor:
        """As :meth:`Step.__call__`."""
        updates = self.updates
        return self.training.run(self.shares.blocks(batch), on_gradients=updates.on_gradients, scale=updates.loss_scale)

    def evaluate(self, batch: Batch) -> Tensor:
        """As :meth:`Step.evaluate`, in the modules' own evaluation mode."""
        return self.training.evaluate(self.shares.blocks(batch))

    def state_dict(self) -> dict[str, Tensor]:
        """DTensors of this rank's stage, by the model's names; they share the step's memory.

        A parameter that the plan cuts has an entry for each part, with its rows and columns behind the name:
        ``weight[0:32, 32:64]``.
        """
        origins = self.training.stage.origins
        found: dict[str, Tensor] = {}
        by_name: dict[str, dict[str, Tensor]] = {}
        for path, parameter in self._stage.named_parameters():
            origin = origins[path]
            tensor = parameter.detach()
            assert isinstance(tensor, DTensor)
            if self.blocks[path].transposed:
                tensor = tensor.t()
            cuts = (origin.rows, origin.columns)[: tensor.ndim]
            if self.blocks[path].transposed:
                cuts = cuts[::-1]
            part = ", ".join(":".join(map(str, cut)) if cut else ":" for cut in cuts)
            suffix = f"[{part}]" if any(cuts) else ""
            by_name.setdefault(origin.name, {})[suffix] = tensor
        for path, buffer in self._stage.named_buffers():
            by_name.setdefault(self.blocks[path].name, {})[""] = buffer
        for key, name in self.saved_names.items():
            found.update({f"{key}{suffix}": tensor for suffix, tensor in by_name.get(name, {}).items()})
        return found

    @property
    def plan_name(self) -> str:
        """As :attr:`Step.plan_name`."""
        return sha256(canonical_json(self.plan).encode()).hexdigest()

    def _described(self) -> tuple[str, str, float | None, int | None]:
        plan, record = self.plan, self.plan.record
        devices = f"{plan.devices} devices, {len(plan.stages)} stages"
        if record is None:
            return plan.model.source, devices, None, None
        return plan.model.source, devices, record.objective_seconds, record.tensor_bytes


def load_layer_step(plan: LayerPlan, step: TrainingStep, how: LoadOptions) -> LayerStep:
    """Step of a layer plan; as :func:`runtime.library.loading.load`.

    Parameters
    ----------
    plan
        The plan.
    step
        The module, and an example of a batch.
    how
        What the user chose.

    Raises
    ------
    FamilyError, LaunchError, PlanError, OptimizerRefusedError, WeightsError
        The model, the job or the optimizer cannot do what the plan says; the weights are not the model's.
    """
    check_layer_plan(plan)
    if how.accumulate != 1:
        raise LoadError(f"accumulate {how.accumulate}: the plan itself has {plan.micro_batches} micro-batches")
    module, spec, device, clip_norm = step.module, optimizer_named(plan.optimizer), how.device, how.clip_norm
    family = model_family(step)
    check_model(plan, family, step.example_kwargs)
    meshes = plan_meshes(plan, device.type)
    model = module_tensors(module)
    trained = {name: torch.empty_like(p, device="meta") for name, p in module.named_parameters() if p.requires_grad}
    dimensions = {name: parameter.ndim for name, parameter in trained.items()}
    factory = how.optimizer or planned_optimizer(spec)
    check_element_wise(factory, dimensions, device)
    measured = measured_optimizer(factory, trained, spec, clip_norm, device)
    scale = how.loss_scale(trained.values(), spec)
    first_names = {alias: tensor.name for tensor in model for alias in (tensor.name, *tensor.aliases)}
    saved_names = {key: first_names[key] for key in module.state_dict()}
    arguments = StepArguments.of(module, step.example_args, step.example_kwargs)
    own = how.own_tensors(module)
    with ExitStack() as stack:
        read = reader_without_module(module, own, stack.enter_context(how.source()))

        def made(stage: BuiltStage, shards: Mapping[str, Tensor]) -> UserOptimizer:
            parameters = dict(stage.module.named_parameters())
            copies = {path: _copies(plan.stage_sizes[meshes.stage], stage, path, parameters[path]) for path in shards}
            clipping = None if clip_norm is None else Clipping(clip_norm, copies, device)
            names = {path: stage.origins[path].name for path in shards}
            found = UserOptimizer(factory, shards, spec, clipping, ShardNames(names, dimensions), scale)
            if found.order is UpdateOrder.AT_ONCE and any(layer.offload_optimizer for layer in plan.layers):
                raise OptimizerRefusedError(
                    "the plan keeps the optimizer's state of some layers in host memory, and fetches it parameter by "
                    "parameter: leave fused and foreach out"
                )
            return found

        training = LayerTraining(plan, family, module, meshes, read, device, made)
    number, blocks = training.share
    tensors = [
        BatchTensor(name, tuple(tensor.shape), tensor.dtype, (shard(0),))
        for name, tensor in zip(arguments.names, arguments.tensors, strict=True)
    ]
    shares = BatchShares(tensors, arguments.names, (blocks,), (number,))
    peak = 0
    if plan.record is not None and plan.record.engine_peaks:
        predicted = plan.record.engine_peaks[meshes.stage].nbytes
        peak = predicted + _more_state(training, measured, spec)
        check_excess(peak, predicted, plan.record.tensor_bytes, factory, plan.optimizer)
    return LayerStep(plan, module, training, shares, model, saved_names, device, peak)


def _copies(devices: int, stage: BuiltStage, path: str, parameter: Tensor) -> int:
    """Ranks that hold the same block of a parameter of a stage with so many devices."""
    assert isinstance(parameter, DTensor)
    placed = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    blocks = prod(size for placement, size in placed if not placement.is_replicate())
    return devices // blocks * (2 if path in stage.shared_with else 1)


def _more_state(training: LayerTraining, measured: MeasuredOptimizer, spec: OptimizerSpec) -> int:
    """Bytes of this rank's optimizer state on the device beyond those of the plan's optimizer."""
    more = 0
    for path, parameter in training.parameters().items():
        layer = training.stage.layers[path]
        if parameter.requires_grad and not (layer.offload_optimizer or layer.offload_parameters):
            local = local_tensor(parameter)
            dtype = str(local.dtype).removeprefix("torch.")
            more += measured.per_element[dtype].state * local.numel() - spec.state(dtype).nbytes(local.numel())
    return more
