"""Tensors that a loss function closes over, made inputs of the step.

``loss_fn = lambda output: F.cross_entropy(output, labels)`` is the first thing that people write. Its labels are data
of the step like the example arguments: every step brings others, and every rank has its part of them. So each tensor
that the function closes over becomes an argument of it by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from planner.common.model_error import ModelError

LossFunction = Callable[..., Tensor]


def lift_tensors(
    module: nn.Module, kwargs: Mapping[str, Any], loss_fn: LossFunction | None
) -> tuple[LossFunction | None, dict[str, Any]]:
    """A loss function that takes the tensors that it closed over as arguments, and the example arguments with them.

    Parameters
    ----------
    module
        The module of the step.
    kwargs
        Its example arguments by keyword.
    loss_fn
        As in :class:`planner.models.references.TrainingStep`. One that closes over no tensor stays as it is.

    Raises
    ------
    ModelError
        A tensor has the name of another argument, or the module takes any keyword; the message says how to pass it.
    """
    found = _tensors(loss_fn)
    if not found or not isinstance(loss_fn, FunctionType):
        return loss_fn, dict(kwargs)
    parameters = inspect.signature(module.forward).parameters
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    own = list(inspect.signature(loss_fn).parameters)
    taken = {*kwargs, *parameters, *own}
    for name in found:
        if open_ended or name in taken:
            raise ModelError(
                f"loss_fn closes over the tensor {name!r}: make it a parameter, loss_fn(output, {name}), give it in "
                f"example_kwargs as {name!r}, and let forward take keywords of other names only"
            )
    return _with_arguments(loss_fn, tuple(found)), {**kwargs, **found}


def _tensors(loss_fn: LossFunction | None) -> dict[str, Tensor]:
    """Tensors that a function closes over, by name."""
    if not isinstance(loss_fn, FunctionType) or loss_fn.__closure__ is None:
        return {}
    found = {}
    for name, cell in zip(loss_fn.__code__.co_freevars, loss_fn.__closure__, strict=True):
        content = _content(cell)
        if isinstance(content, Tensor) and not isinstance(content, nn.Parameter):
            found[name] = content
    return found


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None


def _with_arguments(loss_fn: FunctionType, names: tuple[str, ...]) -> LossFunction:
    """The function with arguments in place of some of the names that it closes over."""
    places = {name: position for position, name in enumerate(loss_fn.__code__.co_freevars)}

    def lifted(output: Any, *args: Any, **given: Any) -> Tensor:
        cells = list(loss_fn.__closure__ or ())
        for name in names:
            cells[places[name]] = CellType(given.pop(name))
        function = FunctionType(
            loss_fn.__code__, loss_fn.__globals__, loss_fn.__name__, loss_fn.__defaults__, tuple(cells)
        )
        function.__kwdefaults__ = loss_fn.__kwdefaults__
        loss: Tensor = function(output, *args, **given)
        return loss

    signature = inspect.signature(loss_fn)
    further = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    known = list(signature.parameters.values())
    last = [parameter for parameter in known if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    lifted.__signature__ = signature.replace(  # type: ignore[attr-defined]  # what inspect.signature reads
        parameters=[*(parameter for parameter in known if parameter not in last), *further, *last]
    )
    return lifted
