"""The user's optimizer on local shards: parameter by parameter as the plan says, or once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.graph.optimizers import OptimizerSpec
from runtime.library.optimizers.probe import (
    ONE_BY_ONE,
    NamedParameters,
    OptimizerFactory,
    is_fused,
    make_optimizer,
    stand_in,
    updates_all_at_once,
)
from runtime.library.optimizers.scaling import LossScale
from runtime.measure.local_shards import local_tensor
from runtime.measure.optimizer import HYPERPARAMETERS, MASTER, as_taken

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


def planned_optimizer(spec: OptimizerSpec) -> OptimizerFactory:
    """The optimizer that a plan names, with the settings of ``meshwright run``: one parameter after another."""
    settings = HYPERPARAMETERS[spec.name]
    if spec.name.startswith("sgd"):
        return lambda parameters: torch.optim.SGD(list(parameters), lr=settings.lr, momentum=settings.momentum)

    def made(parameters: NamedParameters) -> torch.optim.Optimizer:
        found = torch.optim.AdamW(
            list(parameters),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=spec.fused or None,
        )
        for group in found.param_groups:
            group[ONE_BY_ONE] = True
        return found

    return made


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
    copies
        Number of ranks that hold the same block of a gradient as this one, by its name here.
    device
        Where the norm is computed.
    """

    norm: float
    copies: Mapping[str, int]
    device: torch.device

    def total_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Euclidean norm of the global gradients, a float32 scalar, from local ones; a collective of all ranks.

        No sum of a gradient is pending. A block that ``n`` ranks hold counts ``1/n`` on each of them; the sum over all
        ranks then has every block once.
        """
        total = torch.zeros((), device=self.device)
        if gradients:
            squares = [
                torch.linalg.vector_norm(local_tensor(gradient), dtype=torch.float32).square() / self.copies[name]
                for name, gradient in gradients.items()
            ]
            total = torch.stack([square.to(self.device) for square in squares]).sum()
        dist.all_reduce(total)
        return total.sqrt()

    def factor(self, total_norm: Tensor) -> Tensor:
        """What gradients are multiplied by."""
        return (self.norm / (total_norm + _TINY)).clamp(max=1.0)


@dataclass(frozen=True, slots=True)
class ShardNames:
    """Names of a rank's shards in the model.

    Parameters
    ----------
    names
        Name of the model's parameter by the shard's own name; of one parameter a rank may have several shards, or none.
    dimensions
        Number of dimensions of every trained parameter of the model by name, in the model's order.
    """

    names: Mapping[str, str]
    dimensions: Mapping[str, int]


class UserOptimizer:
    """A torch optimizer as a :class:`~runtime.measure.optimizer.ShardOptimizer`.

    Parameters
    ----------
    factory
        Makes it from (name, parameter); it is given every trained parameter of the model, so that the groups are the
        same on all ranks.
    shards
        Local shards of the trained parameters by name; updated in place.
    spec
        What the plan assumed; where it keeps a master copy of a 16-bit parameter, the optimizer trains that copy.
    clipping
        None: gradients are not clipped.
    model
        Names of the shards in the model; None: each is a parameter of the model, and there are no others.
    scale
        Of the loss; with ``clipping`` only, whose norm may be infinite.

    Attributes
    ----------
    torch
        The optimizer itself.
    spec
        As above.
    parameters
        What it trains, by name: the shards as parameters, or their master copies.
    group_names
        Names of the model's parameters in each group.
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
        model: ShardNames | None = None,
        scale: LossScale | None = None,
    ) -> None:
        self._shards = dict(shards)
        self.spec = spec
        self.masters = {
            name: shard.detach().to(torch.float32, memory_format=torch.contiguous_format)
            for name, shard in shards.items()
            if spec.keeps_master(str(shard.dtype).removeprefix("torch."))
        }
        self.parameters = {name: nn.Parameter(self.masters.get(name, shard)) for name, shard in shards.items()}
        own = ShardNames({name: name for name in shards}, {name: shard.ndim for name, shard in shards.items()})
        self.torch, self.group_names = _over_shards(factory, self.parameters, model or own)
        self.clipping = clipping
        self._is_fused = is_fused(self.torch)
        self.order = update_order(self.torch, None if clipping is None else clipping.norm)
        at_of = {parameter: at for at, group in enumerate(self.torch.param_groups) for parameter in group["params"]}
        self._group_of = {name: at_of[parameter] for name, parameter in self.parameters.items()}
        self.step_count = 0
        self.total_norm: Tensor | None = None
        self.scale = scale
        self._factor: Tensor | None = None
        self._skips = False

    def state_tensors(self) -> list[Tensor]:
        """Master copies, and the state that exists: torch makes it at the first step."""
        kept = (value for state in self.torch.state.values() for value in state.values())
        return [*self.masters.values(), *(value for value in kept if isinstance(value, Tensor))]

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Tensors of a parameter's state that are as large as its shard, the master copy included."""
        parameter = self.parameters[name]
        found = {
            key: value
            for key, value in self.torch.state[parameter].items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }
        return found | ({MASTER: self.masters[name]} if name in self.masters else {})

    def put_state(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Use other tensors in their place."""
        rest = dict(tensors)
        if name in self.masters:
            self.masters[name] = self.parameters[name].data = rest.pop(MASTER)
        self.torch.state[self.parameters[name]].update(rest)

    def groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Groups of the optimizer, each with the names of its parameters in the model."""
        return list(zip(self.torch.param_groups, self.group_names, strict=True))

    def begin_step(self) -> None:
        """Count a step."""
        self.step_count += 1

    @property
    def on_gradients(self) -> Callable[[Mapping[str, Tensor]], None] | None:
        """What a step calls with all local gradients before the first update; None where it need not wait for them."""
        return None if self.clipping is None else self.clip

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is multiplied by."""
        return 1.0 if self.scale is None else self.scale.value

    def clip(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the norm of a step's local gradients; the updates that follow scale by it.

        With a scaled loss the norm is that of the gradients divided by the scale, and nothing is updated where it is
        not finite: a value that is not finite on one rank makes the norm so on all.
        """
        assert self.clipping is not None
        total = self.clipping.total_norm(gradients)
        if self.scale is None:
            self.total_norm, self._factor = total, self.clipping.factor(total)
            return
        self.total_norm = total / self.scale.value
        self._factor = self.clipping.factor(self.total_norm) / self.scale.value
        self._skips = not bool(total.isfinite())

    def update(self, name: str, gradient: Tensor) -> None:
        """Update a parameter with its local gradient, or keep the gradient for :meth:`end_step`."""
        if self._skips:
            return
        parameter = self.parameters[name]
        # Fused kernels take gradients that lie like their parameters.
        laid_out = parameter.is_contiguous() and (self.order is UpdateOrder.AT_ONCE or self._is_fused)
        gradient = as_taken(gradient, parameter.dtype, laid_out)
        if self._factor is not None:
            # A new tensor: gradients of two parameters may be one tensor.
            gradient = gradient * self._factor.to(gradient.device, gradient.dtype)
        parameter.grad = gradient
        del gradient
        if self.order is UpdateOrder.AT_ONCE:
            return
        self._step_alone(parameter, self._group_of[name])
        parameter.grad = None
        if name in self.masters:
            self._shards[name].copy_(self.masters[name])

    def end_step(self) -> None:
        """Update all parameters where the optimizer takes them at once."""
        skips, self._skips, self._factor = self._skips, False, None
        if self.scale is not None:
            self.scale.after_step(not skips)
        if self.order is UpdateOrder.AT_ONCE and not skips:
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


def _over_shards(
    factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter], model: ShardNames
) -> tuple[torch.optim.Optimizer, list[list[str]]]:
    """Optimizer over this rank's shards, and the names of the model's parameters in each of its groups.

    The factory sees every parameter of the model by its name once, as one of its shards or, where this rank has none,
    as a small tensor in its place. Further shards of a parameter come from further calls, into the group of the first.
    """
    shards_of: dict[str, list[nn.Parameter]] = {name: [] for name in model.dimensions}
    for name, parameter in parameters.items():
        shards_of[model.names[name]].append(parameter)
    made: torch.optim.Optimizer | None = None
    group_names: list[list[str]] = []
    for turn in range(max(1, *map(len, shards_of.values()))):
        given = {
            name: found[turn] if turn < len(found) else stand_in(model.dimensions[name])
            for name, found in shards_of.items()
        }
        named = {parameter: name for name, parameter in given.items()}
        one = make_optimizer(factory, list(given.items()))
        names = [[named[parameter] for parameter in group["params"]] for group in one.param_groups]
        for group in one.param_groups:
            group["params"] = [entry for entry in group["params"] if turn < len(shards_of[named[entry]])]
            group.pop("param_names", None)
        absent = [entry for name, entry in given.items() if turn >= len(shards_of[name])]
        for entry in absent:
            one.state.pop(entry, None)
        if made is None:
            made, group_names = one, names
            continue
        for group, more in zip(made.param_groups, one.param_groups, strict=True):
            group["params"] += more["params"]
        made.state.update(one.state)
    assert made is not None
    return made, group_names
