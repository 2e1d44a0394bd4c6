"""What an optimizer does to one element: whether it treats elements alone, and the bytes that it takes for each.

Found by running it on tensors of a few elements, not by its name: an optimizer of one's own is tried like torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planner.torch_adapter.meters.storage_meter import StorageMeter

NamedParameters = Sequence[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]
"""A class of ``torch.optim``, a ``functools.partial`` of one, or a function: from (name, parameter) to an optimizer."""


class OptimizerRefusedError(ValueError):
    """An optimizer that cannot update shards one by one, or needs more memory than the plan allows."""


ONE_BY_ONE = "one_by_one"
"""Entry of a parameter group whose parameters are updated one after another, by a fused kernel too."""

_SIDE, _STEPS = 4, 3
_ELEMENTS = 1 << 14
"""Elements of the tensor on which bytes are measured: so many that counts of steps do not matter."""
_TOLERANCE = 1e-6
"""Of a difference, relative to the largest change of an element; the trial is in 64 bits."""


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes that an optimizer takes per element of a parameter.

    Parameters
    ----------
    state
        Between steps. Tensors that do not grow with the parameter (a count of steps) are not in it.
    workspace
        At once while a parameter is updated, beyond parameter, gradient and state.
    """

    state: int
    workspace: int


def make_optimizer(factory: OptimizerFactory, parameters: NamedParameters) -> torch.optim.Optimizer:
    """Optimizer of a factory over named parameters, one after another where the user does not say otherwise.

    Torch's default on CUDA is to update all parameters at once, with temporaries for all of them.

    Raises
    ------
    OptimizerRefusedError
        The factory fails or returns something else.
    """
    try:
        made = factory(parameters)
    except Exception as error:
        raise OptimizerRefusedError(
            f"optimizer {_name(factory)} cannot be made from named parameters ({type(error).__name__}: {error}): give "
            "a class of torch.optim, functools.partial(class, lr=...), or a function of a list of (name, parameter)"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise OptimizerRefusedError(
            f"optimizer {_name(factory)} returned a {type(made).__name__}: give one that makes a torch.optim.Optimizer"
        )
    for group in made.param_groups:
        if not group.get("fused") and group.get("foreach", False) is None:
            group["foreach"] = False
    return made


def updates_all_at_once(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user asked for one kernel over many parameters."""
    groups = [group for group in optimizer.param_groups if not group.get(ONE_BY_ONE)]
    return any(group.get("foreach") or group.get("fused") for group in groups)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused kernel updates some of the parameters."""
    return any(group.get("fused") for group in optimizer.param_groups)


def check_element_wise(factory: OptimizerFactory, trained: Mapping[str, int], device: torch.device) -> None:
    """Refuse an optimizer under which the shards of a parameter do not become what the whole becomes.

    Parameters
    ----------
    factory
        The optimizer.
    trained
        Number of dimensions of every trained parameter by name; all are tried, with a few elements each.
    device
        Where to try.

    Raises
    ------
    OptimizerRefusedError
        Two halves of a tensor are updated otherwise than the whole, or the optimizer does not run on gradients alone.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn() -> dict[str, Tensor]:
        return {
            name: torch.randn((_SIDE,) * ndim, generator=generator, dtype=torch.float64).to(device)
            for name, ndim in trained.items()
        }

    start, gradients = drawn(), [drawn() for _ in range(_STEPS)]
    # Halves whose gradients differ in size: a norm over a shard is not that over the whole.
    sizes = torch.linspace(0.5, 3.0, _SIDE, device=device, dtype=torch.float64)
    for found in gradients:
        for name, gradient in found.items():
            scaled = gradient * sizes if gradient.ndim else gradient
            found[name] = scaled * sizes.reshape(-1, *(1,) * (gradient.ndim - 1)) if gradient.ndim > 1 else scaled
    whole = _trained(factory, start, gradients)
    for dim in (0, -1):
        halves = [
            _trained(factory, _half(start, dim, at), [_half(found, dim, at) for found in gradients])
            for at in (0, _SIDE // 2)
        ]
        for name, expected in whole.items():
            if not expected.ndim:
                continue
            joined = torch.cat([half[name] for half in halves], dim)
            error, change = (float(tensor.abs().max()) for tensor in (joined - expected, expected - start[name]))
            if not error <= _TOLERANCE * change:
                raise OptimizerRefusedError(
                    f"optimizer {_name(factory)} is not element-wise: two halves of a parameter like {name} differ "
                    f"from the whole by {error:.1e} of a change of {change:.1e} after {_STEPS} steps, so shards cannot "
                    "be updated by themselves; use one that treats each element alone (AdamW, SGD, ...)"
                )


def element_bytes(
    factory: OptimizerFactory, trained: Mapping[str, int], name: str, dtype: torch.dtype, device: torch.device
) -> ElementBytes:
    """Measured bytes per element of a parameter of ``dtype``, with the settings for the parameter ``name``."""
    start = torch.ones((_ELEMENTS, *(1,) * (trained[name] - 1)), dtype=dtype, device=device)
    parameter = nn.Parameter(start)
    named = {**stand_ins(trained, device), name: parameter}
    optimizer = make_optimizer(factory, list(named.items()))
    _step(factory, optimizer, {parameter: torch.ones_like(start)})
    kept = [tensor for tensor in optimizer.state[parameter].values() if isinstance(tensor, Tensor)]
    state = sum(tensor.nbytes for tensor in kept if 8 * tensor.nbytes >= _ELEMENTS)
    gradient = torch.ones_like(start)
    meter = StorageMeter()
    meter.track(parameter, gradient, *kept)
    before = meter.live_bytes
    with meter:
        _step(factory, optimizer, {parameter: gradient})
    return ElementBytes(round(state / _ELEMENTS), round((meter.peak_bytes - before) / _ELEMENTS))


def stand_ins(trained: Mapping[str, int], device: torch.device) -> dict[str, nn.Parameter]:
    """Small parameters in the place of all trained ones."""
    return {name: stand_in(ndim, device) for name, ndim in trained.items()}


def stand_in(dimensions: int, device: torch.device | None = None) -> nn.Parameter:
    """A small parameter in the place of one with so many dimensions."""
    return nn.Parameter(torch.ones((_SIDE,) * dimensions, device=device))


def _half(tensors: Mapping[str, Tensor], dim: int, at: int) -> dict[str, Tensor]:
    return {name: tensor.narrow(dim, at, _SIDE // 2) if tensor.ndim else tensor for name, tensor in tensors.items()}


def _trained(
    factory: OptimizerFactory, start: Mapping[str, Tensor], gradients: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    named = {name: nn.Parameter(_dense(tensor)) for name, tensor in start.items()}
    optimizer = make_optimizer(factory, list(named.items()))
    for found in gradients:
        _step(factory, optimizer, {named[name]: _dense(gradient) for name, gradient in found.items()})
    return {name: parameter.detach() for name, parameter in named.items()}


def _dense(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _step(
    factory: OptimizerFactory, optimizer: torch.optim.Optimizer, gradients: Mapping[nn.Parameter, Tensor]
) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    try:
        optimizer.step()
    except Exception as error:
        raise OptimizerRefusedError(
            f"optimizer {_name(factory)} fails on small parameters and their gradients alone "
            f"({type(error).__name__}: {error}): use one whose step() needs no closure and takes dense gradients of "
            "any shape"
        ) from error
    optimizer.zero_grad(set_to_none=True)


def _name(factory: object) -> str:
    inner = getattr(factory, "func", factory)
    return getattr(inner, "__name__", type(inner).__name__)
