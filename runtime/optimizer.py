"""The optimizer step on local shards, one parameter after another.

Torch's own single-tensor AdamW and SGD, called per parameter, so that the temporaries of one parameter
are alive at a time and each gradient can be dropped right after its update. Element-wise, so a shard is
updated as it would be inside the whole parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from planner.optimizers import optimizer_named


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Fixed settings of an optimizer, named as torch names them."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


HYPERPARAMETERS: Mapping[str, Hyperparameters] = {
    "adamw": Hyperparameters(lr=1e-3, weight_decay=0.01),
    "sgd": Hyperparameters(lr=1e-2),
}
"""Settings by the name of the optimizer in a plan. SGD has neither momentum nor weight decay."""


class LocalOptimizer:
    """AdamW or SGD over local shards; the state exists from construction on.

    Parameters
    ----------
    name
        ``adamw`` or ``sgd``.
    parameters
        Local shard of each trainable parameter by name.

    Attributes
    ----------
    step_count
        Number of steps begun with :meth:`begin_step`.
    state
        AdamW's moments ``exp_avg`` and ``exp_avg_sq`` by parameter name, each like its parameter; empty
        for SGD.

    Raises
    ------
    OptimizerError
        If the optimizer is not known.
    """

    def __init__(self, name: str, parameters: Mapping[str, Tensor]) -> None:
        self.name = optimizer_named(name).name
        self.settings = HYPERPARAMETERS[name]
        self.step_count = 0
        self._parameters = dict(parameters)
        self.state: dict[str, dict[str, Tensor]] = {}
        if name == "adamw":
            for key, parameter in parameters.items():
                self.state[key] = {
                    moment: torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                    for moment in ("exp_avg", "exp_avg_sq")
                }

    def state_tensors(self) -> list[Tensor]:
        """Every tensor of the state."""
        return [tensor for moments in self.state.values() for tensor in moments.values()]

    def begin_step(self) -> None:
        """Count a step; call it before the step's first :meth:`update`."""
        self.step_count += 1

    def update(self, name: str, gradient: Tensor) -> None:
        """Update the shard of parameter ``name`` in place with its local gradient.

        Beyond parameter, gradient and state, AdamW holds two tensors of the shard's size while it runs
        (the denominator before and after the bias correction), SGD none.
        """
        with torch.no_grad():
            if self.name == "adamw":
                self._adamw(name, gradient)
            else:
                self._sgd(name, gradient)

    def _adamw(self, name: str, gradient: Tensor) -> None:
        moments = self.state[name]
        adamw(
            [self._parameters[name]],
            [gradient],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            # Torch adds one to the count itself.
            [torch.tensor(float(self.step_count - 1))],
            foreach=False,
            fused=False,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=self.settings.lr,
            weight_decay=self.settings.weight_decay,
            eps=self.settings.eps,
            maximize=False,
        )

    def _sgd(self, name: str, gradient: Tensor) -> None:
        sgd(
            [self._parameters[name]],
            [gradient],
            [None],
            foreach=False,
            fused=False,
            weight_decay=self.settings.weight_decay,
            momentum=0.0,
            lr=self.settings.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def whole_model_optimizer(name: str, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Torch's own optimizer over a whole module with the same settings: what one process uses.

    Raises
    ------
    OptimizerError
        If the optimizer is not known.
    """
    settings = HYPERPARAMETERS[optimizer_named(name).name]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trained, lr=settings.lr, foreach=False)
    return torch.optim.AdamW(
        trained,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        foreach=False,
    )
