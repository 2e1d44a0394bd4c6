"""The user's optimizer on local shards: parameter by parameter as the plan says, or once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.graph.optimizers import OptimizerSpec
from planner.graph.placement import REPLICATE, Placement
from runtime.library.optimizer_probe import OptimizerFactory, make_optimizer, updates_all_at_once
from runtime.measure.optimizer import HYPERPARAMETERS

_TINY = 1e-6
"""Added to a norm before it divides, as :func:`torch.nn.utils.clip_grad_norm_` does."""


class UpdateOrder(Enum):
    """When the optimizer runs.

    AS_PLANNED
        Each parameter where the schedule updates it; its gradient is freed behind it.
    AFTER_ALL
        One parameter after another once all gradients exist: for the norm of all of them.
    AT_ONCE
        One call for all parameters at the end, for ``foreach`` and ``fused``.
    """

    AS_PLANNED = "each parameter where the plan updates it"
    AFTER_ALL = "one parameter after another, once all gradients exist"
    AT_ONCE = "all parameters at once"


def planned_optimizer(name: str) -> OptimizerFactory:
    """The optimizer that a plan names, with the settings of ``meshwright run``."""
    settings = HYPERPARAMETERS[name]
    if name.startswith("sgd"):
        return lambda parameters: torch.optim.SGD(list(parameters), lr=settings.lr, momentum=settings.momentum)
    return lambda parameters: torch.optim.AdamW(
        list(parameters), lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )


def update_order(optimizer: torch.optim.Optimizer, clip_norm: float | None) -> UpdateOrder:
    """When an optimizer runs."""
    if updates_all_at_once(optimizer):
        return UpdateOrder.AT_ONCE
    return UpdateOrder.AS_PLANNED if clip_norm is None else UpdateOrder.AFTER_ALL


@dataclass(frozen=True, slots=True)
class Clipping:
    """Scaling of gradients to a norm over the whole model.

    Parameters
    ----------
    norm
        Largest norm.
    placements
        Of the parameters, by name.
    mesh
        Size of each mesh axis.
    """

    norm: float
    placements: Mapping[str, Placement]
    mesh: tuple[int, ...]

    def total_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Euclidean norm of the global gradients, a float32 scalar, from local ones; a collective of all ranks.

        A gradient has its parameter's placement, so no sum is pending. A block that ``n`` ranks hold counts ``1/n`` on
        each of them; the sum over all ranks then has every block once.
        """
        squares = [
            torch.linalg.vector_norm(gradient, dtype=torch.float32).square() / self._copies(name)
            for name, gradient in gradients.items()
        ]
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        return total.sqrt()

    def factor(self, total_norm: Tensor) -> Tensor:
        """What gradients are multiplied by."""
        return (self.norm / (total_norm + _TINY)).clamp(max=1.0)

    def _copies(self, name: str) -> int:
        axes = zip(self.placements[name], self.mesh, strict=True)
        return prod(size for placement, size in axes if placement == REPLICATE)


class UserOptimizer:
    """A torch optimizer as a :class:`~runtime.measure.optimizer.ShardOptimizer`.

    Parameters
    ----------
    factory
        Makes it from (name, parameter).
    shards
        Local shards of the trained parameters by name; updated in place.
    spec
        What the plan assumed; where it keeps a master copy of a 16-bit parameter, the optimizer trains that copy.
    clipping
        None: gradients are not clipped.

    Attributes
    ----------
    torch
        The optimizer itself.
    parameters
        What it trains, by name: the shards as parameters, or their master copies.
    step_count
        Steps begun.
    total_norm
        Norm of the last step's gradients before they were clipped, a scalar; None without clipping.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        shards: Mapping[str, Tensor],
        spec: OptimizerSpec,
        clipping: Clipping | None = None,
    ) -> None:
        self._shards = dict(shards)
        self.masters = {
            name: shard.detach().to(torch.float32, memory_format=torch.contiguous_format)
            for name, shard in shards.items()
            if spec.keeps_master(str(shard.dtype).removeprefix("torch."))
        }
        self.parameters = {name: nn.Parameter(self.masters.get(name, shard)) for name, shard in shards.items()}
        self.torch = make_optimizer(factory, list(self.parameters.items()))
        self.clipping = clipping
        self.order = update_order(self.torch, None if clipping is None else clipping.norm)
        self._group_of = {name: at for at, (_, names) in enumerate(self.groups()) for name in names}
        self.step_count = 0
        self.total_norm: Tensor | None = None
        self._factor: Tensor | None = None

    def state_tensors(self) -> list[Tensor]:
        """Master copies, and the state that exists: torch makes it at the first step."""
        kept = (value for state in self.torch.state.values() for value in state.values())
        return [*self.masters.values(), *(value for value in kept if isinstance(value, Tensor))]

    def groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Groups of the optimizer, each with the names of its parameters."""
        name_of = {parameter: name for name, parameter in self.parameters.items()}
        return [(group, [name_of[parameter] for parameter in group["params"]]) for group in self.torch.param_groups]

    def begin_step(self) -> None:
        """Count a step."""
        self.step_count += 1

    def clip(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the norm of a step's local gradients; the updates that follow scale by it."""
        assert self.clipping is not None
        self.total_norm = self.clipping.total_norm(gradients)
        self._factor = self.clipping.factor(self.total_norm)

    def update(self, name: str, gradient: Tensor) -> None:
        """Update a parameter with its local gradient, or keep the gradient for :meth:`end_step`."""
        parameter = self.parameters[name]
        if self._factor is not None:
            # A new tensor: gradients of two parameters may be one tensor.
            gradient = gradient * self._factor.to(gradient.dtype)
        gradient = gradient.to(parameter.dtype)
        if self.order is UpdateOrder.AT_ONCE:
            # Fused kernels take gradients that lie like their parameters.
            parameter.grad = gradient.contiguous() if parameter.is_contiguous() else gradient
            return
        parameter.grad = gradient
        del gradient
        self._step_alone(parameter, self._group_of[name])
        parameter.grad = None
        if name in self.masters:
            self._shards[name].copy_(self.masters[name])

    def end_step(self) -> None:
        """Update all parameters where the optimizer takes them at once."""
        self._factor = None
        if self.order is UpdateOrder.AT_ONCE:
            self.torch.step()
            self.torch.zero_grad(set_to_none=True)
            for name, master in self.masters.items():
                self._shards[name].copy_(master)

    def _step_alone(self, parameter: nn.Parameter, at: int) -> None:
        """Run the optimizer while it sees one parameter of a group: its loops over the others would take time."""
        optimizer, groups = self.torch, self.torch.param_groups
        group = groups[at]
        every = group["params"]
        optimizer.param_groups, group["params"] = [group], [parameter]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups, group["params"] = groups, every
