"""The optimizer step on local shards, one parameter after another.

Torch's own AdamW and SGD, called per parameter, so that the temporaries of one parameter are alive at a time and each
gradient can be dropped right after its update. Element-wise, so a shard is updated as it would be inside the whole
parameter. Torch's AdamW is one kernel (``fused``), without temporaries; on CUDA of several parameters at once where
nothing but updates follows, as many as leave the peak of the step where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from planner.graph.optimizers import OptimizerSpec, optimizer_named
from runtime.measure.update_groups import UpdateMemory, ends_of_groups

MASTER, MOMENTUM, MOMENTS = "master", "momentum_buffer", ("exp_avg", "exp_avg_sq")
"""Names of the state's tensors; those of torch, and the master copy of a 16-bit parameter."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Fixed settings of an optimizer, named as torch names them."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0


HYPERPARAMETERS: Mapping[str, Hyperparameters] = {
    "adamw": Hyperparameters(lr=1e-3, weight_decay=0.01),
    "sgd": Hyperparameters(lr=1e-2),
    "sgd_momentum": Hyperparameters(lr=1e-2, momentum=0.9),
    "adamw_mixed": Hyperparameters(lr=1e-3, weight_decay=0.01),
}
"""Settings by the name of the optimizer in a plan. SGD has no weight decay."""

_SGD = ("sgd", "sgd_momentum")


class ShardOptimizer(Protocol):
    """An optimizer that a training step calls, one parameter after another; ``spec`` is what the plan assumed."""

    step_count: int
    spec: OptimizerSpec

    def state_tensors(self) -> list[Tensor]:
        """Every tensor of the state that exists."""

    def begin_step(self) -> None:
        """Count a step; called before the step's first :meth:`update`."""

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Tensors of a parameter's state that are as large as its shard."""

    def put_state(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Use other tensors in their place."""

    def update(self, name: str, gradient: Tensor) -> None:
        """Update the shard of parameter ``name`` in place with its local gradient, now or in :meth:`end_step`."""

    def end_step(self) -> None:
        """End a step; called after its last :meth:`update`."""


class LocalOptimizer:
    """An optimizer over local shards; the state exists from construction on.

    Parameters
    ----------
    name
        A name of :data:`planner.graph.optimizers.OPTIMIZERS`.
    parameters
        Local shard of each trainable parameter by name, at its initial value: a master copy starts from it.
    last
        Whether updates are the last of a step, so that memory is fullest at the first of them.
    fused
        Whether AdamW is one kernel.

    Attributes
    ----------
    at_once
        Whether fused kernels update several parameters at once, which is so on CUDA where updates are last.
    step_count
        Number of steps begun with :meth:`begin_step`.
    state
        By parameter name, each of the shard's shape: AdamW's moments ``exp_avg`` and ``exp_avg_sq``, SGD's
        ``momentum_buffer``, both of the parameter's dtype. With ``adamw_mixed`` a parameter of 16 bits has
        its moments in 32 bits, and the 32-bit copy ``master`` that is trained in its place.

    Raises
    ------
    OptimizerError
        If the optimizer is not known.
    """

    def __init__(self, name: str, parameters: Mapping[str, Tensor], last: bool = False, fused: bool = True) -> None:
        self.spec = optimizer_named(name, fused=fused)
        self.settings = HYPERPARAMETERS[name]
        self.step_count = 0
        self.at_once = last and all(parameter.is_cuda for parameter in parameters.values())
        self._waiting: list[tuple[str, Tensor]] = []
        self._seen: list[UpdateMemory] = []
        self._ends: frozenset[str] | None = None
        self._parameters = dict(parameters)
        self.state = {key: self._initial_state(parameter) for key, parameter in parameters.items()}

    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        if self.spec.name in _SGD:
            return {MOMENTUM: _zeros_like(parameter)} if self.settings.momentum else {}
        if not _has_master(self.spec, parameter):
            return {moment: _zeros_like(parameter) for moment in MOMENTS}
        master = parameter.detach().to(torch.float32, memory_format=torch.contiguous_format)
        return {MASTER: master, **{moment: _zeros_like(master) for moment in MOMENTS}}

    def state_tensors(self) -> list[Tensor]:
        """Every tensor of the state."""
        return [tensor for kept in self.state.values() for tensor in kept.values()]

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Tensors of a parameter's state."""
        return self.state[name]

    def put_state(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Use other tensors in their place."""
        self.state[name] = dict(tensors)

    def begin_step(self) -> None:
        """Count a step; call it before the step's first :meth:`update`."""
        self.step_count += 1

    def end_step(self) -> None:
        """End a step: update what waits. The first step shows what may be updated at once."""
        self._update_waiting()
        if self._ends is None and self._seen:
            self._ends = ends_of_groups(self._seen)
            self._seen.clear()

    def update(self, name: str, gradient: Tensor) -> None:
        """Update the shard of parameter ``name`` in place with its local gradient, or keep both for the next updates.

        Beyond parameter, gradient and state, an update holds a copy of the gradient where that has another dtype than
        what is updated, or where a fused kernel needs it contiguous. AdamW that is not fused holds two tensors of the
        shard's size as well, the denominator before and after the bias correction.
        """
        if not (self.at_once and self._is_fused(name)):
            self._update([(name, gradient)])
            return
        self._waiting.append((name, gradient))
        if self._ends is None:
            self._seen.append(self._memory_of(name, gradient))
        if self._ends is None or name in self._ends:
            self._update_waiting()

    def _update_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._update(waiting)

    def _is_fused(self, name: str) -> bool:
        """Whether torch's fused kernel updates a parameter; it takes tensors of the same strides."""
        parameter = self._parameters[name]
        return self.spec.fused and parameter.is_contiguous()

    def _memory_of(self, name: str, gradient: Tensor) -> UpdateMemory:
        parameter, trained = self._parameters[name], self.state[name].get(MASTER, self._parameters[name])
        dtype, made = (str(tensor.dtype).removeprefix("torch.") for tensor in (parameter, gradient))
        copied = trained.nbytes if gradient.dtype != trained.dtype or not gradient.is_contiguous() else 0
        planned = self.spec.workspace(dtype, made, gradient.is_contiguous()).nbytes(parameter.numel())
        return UpdateMemory(name, gradient.nbytes, copied, planned)

    def _update(self, updates: Sequence[tuple[str, Tensor]]) -> None:
        """Update parameters together; of several, each has the fused kernel."""
        fused = self._is_fused(updates[0][0])
        with torch.no_grad():
            trained = [self.state[name].get(MASTER, self._parameters[name]) for name, _ in updates]
            gradients = [
                as_taken(gradient, tensor.dtype, fused) for tensor, (_, gradient) in zip(trained, updates, strict=True)
            ]
            states = [self.state[name] for name, _ in updates]
            if self.spec.name in _SGD:
                self._sgd(trained, gradients, states)
            else:
                self._adamw(trained, gradients, states, fused)
            for tensor, (name, _) in zip(trained, updates, strict=True):
                if tensor is not self._parameters[name]:
                    self._parameters[name].copy_(tensor)

    def _adamw(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], fused: bool
    ) -> None:
        # The fused kernel takes its counts on the device of the parameters.
        count = torch.full(
            (len(parameters),), float(self.step_count - 1), device=parameters[0].device if fused else "cpu"
        )
        adamw(
            parameters,
            gradients,
            [state[MOMENTS[0]] for state in states],
            [state[MOMENTS[1]] for state in states],
            [],
            list(count.unbind()),  # torch adds one itself
            foreach=False,
            fused=fused,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=self.settings.lr,
            weight_decay=self.settings.weight_decay,
            eps=self.settings.eps,
            maximize=False,
        )

    def _sgd(self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        sgd(
            parameters,
            gradients,
            # Torch makes the buffer from the first gradient; a buffer of zeros becomes the same.
            [state.get(MOMENTUM) for state in states],
            foreach=False,
            fused=False,
            weight_decay=self.settings.weight_decay,
            momentum=self.settings.momentum,
            lr=self.settings.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def whole_model_optimizer(name: str, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Torch's own optimizer over a whole module with the same settings, for the run in one process.

    With master copies the optimizer's parameters are the copies: clear gradients through the module.

    Raises
    ------
    OptimizerError
        If the optimizer is not known.
    """
    spec = optimizer_named(name)
    settings = HYPERPARAMETERS[name]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if name in _SGD:
        return torch.optim.SGD(trained, lr=settings.lr, momentum=settings.momentum, foreach=False)
    masters: dict[Tensor, Tensor] = {
        parameter: parameter.detach().float().requires_grad_() for parameter in trained if _has_master(spec, parameter)
    }
    made = torch.optim.AdamW(
        [masters.get(parameter, parameter) for parameter in trained],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        foreach=False,
        fused=True,
    )
    if masters:
        _train_through_masters(made, masters)
    return made


def _train_through_masters(optimizer: torch.optim.Optimizer, masters: Mapping[Tensor, Tensor]) -> None:
    """Copy gradients to the master copies before every step, and their values to the parameters after it."""

    def before(*_: object) -> None:
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()

    def after(*_: object) -> None:
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
                master.grad = None  # else a copy in 32 bits stays beside the next step's activations

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def as_taken(gradient: Tensor, dtype: torch.dtype, contiguous: bool) -> Tensor:
    """A gradient in a dtype, contiguous where the kernel takes it so: the gradient itself or one copy of it."""
    if gradient.dtype == dtype:
        return gradient.contiguous() if contiguous else gradient
    layout = torch.contiguous_format if contiguous else torch.preserve_format
    return gradient.to(dtype, memory_format=layout)


def _has_master(spec: OptimizerSpec, parameter: Tensor) -> bool:
    return spec.keeps_master(str(parameter.dtype).removeprefix("torch."))


def _zeros_like(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
