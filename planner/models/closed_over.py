"""Tensors that a loss function closes over, made inputs of the step.

``loss_fn = lambda output: F.cross_entropy(output, labels)`` is the first thing that people write. Its labels are data
of the step like the example arguments: every step brings others, and every rank has its part of them. So each tensor
that the function closes over becomes an argument of it, by the name of the variable. A tensor inside a list, tuple,
dictionary, object or module goes by its path with underscores: ``labels_0``, ``batch_target``, ``criterion_weight``.

The function is called with copies of what holds the tensors, never with the objects themselves changed. Methods of
what it uses are searched for the names of attributes; a tensor that the function does not name stays where it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from planner.common.model_error import ModelError
from planner.models.tensor_holders import Search, copy_with
from planner.torch_adapter.tracing.loss_arguments import CLOSED_OVER

LossFunction = Callable[..., Tensor]


def lift_tensors(
    module: nn.Module, kwargs: Mapping[str, Any], loss_fn: LossFunction | None
) -> tuple[LossFunction | None, dict[str, Any]]:
    """A loss function that takes the tensors that it closed over as arguments, and the example arguments with them.

    Parameters
    ----------
    module
        The module of the step; where the loss function uses it, its tensors stay the module's.
    kwargs
        Its example arguments by keyword.
    loss_fn
        As in :class:`planner.models.references.TrainingStep`. One that closes over no tensor stays as it is.

    Raises
    ------
    ModelError
        A tensor has the name of another argument or is trained; the message says what to do instead.
    """
    if loss_fn is None:
        return None, dict(kwargs)
    search = Search(loss_fn, module)
    own = _parameters(loss_fn)
    defaults = {name for name, tensor in search.found.items() if name in own and own[name].default is tensor}
    taken = {*kwargs, *inspect.signature(module.forward).parameters, *(name for name in own if name not in defaults)}
    for name, tensor in search.found.items():
        if name in taken:
            raise ModelError(
                f"loss_fn closes over the tensor {name!r}: make it a parameter, loss_fn(output, {name}), give it in "
                f"example_kwargs as {name!r}, and let forward take keywords of other names only"
            )
        if tensor.requires_grad:
            raise ModelError(
                f"loss_fn closes over the tensor {name!r}, which requires a gradient that the step would not compute: "
                "compute with it in forward, take a parameter of the module from the module in loss_fn, or freeze it "
                "with requires_grad_(False)"
            )
    names = tuple(name for name in search.found if name not in defaults)
    return _with_arguments(loss_fn, search, names) if names else loss_fn, {**kwargs, **search.found}


def _parameters(loss_fn: LossFunction) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).parameters
    except ValueError:  # a function of C
        return {}


def _with_arguments(loss_fn: LossFunction, search: Search, names: tuple[str, ...]) -> LossFunction:
    """The function with arguments in place of the tensors that it closes over."""

    def lifted(*args: Any, **given: Any) -> Tensor:
        tensors = {id(search.found[name]): given.pop(name) for name in names if name in given}
        loss: Tensor = copy_with(loss_fn, search.holders, tensors)(*args, **given)
        return loss

    lifted.__wrapped__ = loss_fn  # type: ignore[attr-defined]  # what inspect reads: its parameters, its source
    if isinstance(loss_fn, nn.Module):
        lifted.__signature__ = inspect.signature(loss_fn.forward)  # type: ignore[attr-defined]
    setattr(lifted, CLOSED_OVER, names)
    return lifted
