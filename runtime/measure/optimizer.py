"""The optimizer step on local shards, one parameter after another.

Torch's own AdamW and SGD, called per parameter, so that the temporaries of one parameter are alive at a time and each
gradient can be dropped right after its update. Element-wise, so a shard is updated as it would be inside the whole
parameter. On CUDA torch's AdamW is one kernel (``fused``), without temporaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from planner.graph.optimizers import OptimizerSpec, optimizer_named

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

    Attributes
    ----------
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

    def __init__(self, name: str, parameters: Mapping[str, Tensor]) -> None:
        self.spec = optimizer_named(name)
        self.settings = HYPERPARAMETERS[name]
        self.step_count = 0
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
        """End a step; every parameter is updated by now."""

    def update(self, name: str, gradient: Tensor) -> None:
        """Update the shard of parameter ``name`` in place with its local gradient.

        Beyond parameter, gradient and state, AdamW holds two tensors of the shard's size while it runs
        (the denominator before and after the bias correction), SGD none, and both one more where the gradient has
        another dtype than what is updated. On CUDA AdamW holds the gradient at most.
        """
        parameter, state = self._parameters[name], self.state[name]
        with torch.no_grad():
            trained = state.get(MASTER, parameter)
            (self._sgd if self.spec.name in _SGD else self._adamw)(trained, gradient.to(trained.dtype), state)
            if trained is not parameter:
                parameter.copy_(trained)

    def _adamw(self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        first, second = (state[moment] for moment in MOMENTS)
        # The fused kernel takes tensors of the same strides, its count on their device.
        fused = parameter.is_cuda and parameter.is_contiguous()
        adamw(
            [parameter],
            [gradient.contiguous() if fused else gradient],
            [first],
            [second],
            [],
            # Torch adds one to the count itself.
            [torch.full((), float(self.step_count - 1), device=parameter.device if fused else "cpu")],
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

    def _sgd(self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        sgd(
            [parameter],
            [gradient],
            # Torch makes the buffer from the first gradient; a buffer of zeros becomes the same.
            [state.get(MOMENTUM)],
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
        fused=all(parameter.is_cuda for parameter in trained),
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

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _has_master(spec: OptimizerSpec, parameter: Tensor) -> bool:
    return spec.keeps_master(str(parameter.dtype).removeprefix("torch."))


def _zeros_like(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
