"""What an optimizer does to one element: whether it treats elements alone, and the bytes that it takes for each.

Found by running it on tensors of a few elements, not by its name: an optimizer of one's own is tried like torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planner.torch_adapter.meters.storage_meter import StorageMeter
from runtime.library.errors import OptimizerRefusedError

NamedParameters = Sequence[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]
"""A class of ``torch.optim``, a ``functools.partial`` of one, or a function: from (name, parameter) to an optimizer."""

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
    return any(group.get("foreach") or group.get("fused") for group in optimizer.param_groups)


def check_element_wise(factory: OptimizerFactory, shapes: Mapping[str, int], device: torch.device) -> None:
    """Refuse an optimizer under which the shards of a parameter do not become what the whole becomes.

    Parameters
    ----------
    factory
        The optimizer.
    shapes
        Number of dimensions by name of the trained parameters; one name of each number is tried.
    device
        Where to try.

    Raises
    ------
    OptimizerRefusedError
        Two halves of a tensor are updated otherwise than the whole, or the optimizer does not run on gradients alone.
    """
    names = {ndim: name for name, ndim in shapes.items() if ndim}
    for ndim, name in names.items():
        generator = torch.Generator().manual_seed(ndim)
        drawn = [torch.randn((_SIDE,) * ndim, generator=generator, dtype=torch.float64) for _ in range(_STEPS + 1)]
        start, *gradients = [tensor.to(device) for tensor in drawn]
        # Halves whose gradients differ in size: a norm over a shard is not that over the whole.
        gradients = [gradient * torch.linspace(0.5, 3.0, _SIDE, device=device) for gradient in gradients]
        whole = _trained(factory, name, start, gradients)
        for dim in {0, ndim - 1}:
            half = _SIDE // 2
            parts = [
                _trained(
                    factory,
                    name,
                    start.narrow(dim, at, half),
                    [gradient.narrow(dim, at, half) for gradient in gradients],
                )
                for at in (0, half)
            ]
            error, change = (float(tensor.abs().max()) for tensor in (torch.cat(parts, dim) - whole, whole - start))
            if not error <= _TOLERANCE * change:
                raise OptimizerRefusedError(
                    f"optimizer {_name(factory)} is not element-wise: two halves of a parameter like {name} "
                    f"differ from the whole by {error:.1e} of a change of {change:.1e} after {_STEPS} steps, so shards cannot be "
                    "updated by themselves; use one that treats each element alone (AdamW, SGD, ...)"
                )


def element_bytes(factory: OptimizerFactory, name: str, dtype: torch.dtype, device: torch.device) -> ElementBytes:
    """Measured bytes per element of a parameter of ``dtype``, with the settings for the parameter ``name``."""
    start = torch.ones(_ELEMENTS, dtype=dtype, device=device)
    parameter = nn.Parameter(start)
    optimizer = make_optimizer(factory, [(name, parameter)])
    _step(factory, optimizer, parameter, torch.ones_like(start))
    state = sum(
        tensor.nbytes
        for tensor in optimizer.state[parameter].values()
        if isinstance(tensor, Tensor) and 8 * tensor.nbytes >= _ELEMENTS
    )
    gradient = torch.ones_like(start)
    meter = StorageMeter()
    meter.track(parameter, gradient)
    with meter:
        _step(factory, optimizer, parameter, gradient)
    # State that the first step made is not tracked, so what is beyond the two is workspace.
    workspace = meter.peak_bytes - 2 * start.nbytes
    return ElementBytes(round(state / _ELEMENTS), round(max(0, workspace) / _ELEMENTS))


def _trained(factory: OptimizerFactory, name: str, start: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    parameter = nn.Parameter(start.clone(memory_format=torch.contiguous_format))
    optimizer = make_optimizer(factory, [(name, parameter)])
    for gradient in gradients:
        _step(factory, optimizer, parameter, gradient.clone(memory_format=torch.contiguous_format))
    return parameter.detach()


def _step(
    factory: OptimizerFactory, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradient: Tensor
) -> None:
    parameter.grad = gradient
    try:
        optimizer.step()
    except Exception as error:
        raise OptimizerRefusedError(
            f"optimizer {_name(factory)} fails on a {tuple(parameter.shape)} parameter and its gradient alone "
            f"({type(error).__name__}: {error}): use one whose step() needs no closure and takes dense gradients of "
            "any shape"
        ) from error
    parameter.grad = None


def _name(factory: object) -> str:
    inner = getattr(factory, "func", factory)
    return getattr(inner, "__name__", type(inner).__name__)
