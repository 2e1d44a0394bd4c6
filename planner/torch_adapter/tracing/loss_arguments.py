"""Which example arguments of a step go to the module, and which to its loss function.

Examples that the module does not take are for the loss alone: by keyword those that it names, by position those that
its remaining parameters or ``*labels`` take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from planner.torch_adapter.tracing.provenance import importable_name

LossFunction = Callable[..., Tensor]

CLOSED_OVER = "meshwright_closed_over"
"""Attribute of a loss function with the names of the keywords that stand for tensors that it closed over."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, ModuleType, FunctionType, BuiltinFunctionType)
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class SharedArguments:
    """Arguments of the module, and further arguments of the loss function after the module's output."""

    module_args: tuple[Any, ...]
    module_kwargs: dict[str, Any]
    loss_args: tuple[Any, ...]
    loss_kwargs: dict[str, Any]


def share_arguments(
    module: nn.Module, loss_fn: LossFunction | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> SharedArguments:
    """Share the example arguments of a step out.

    Those that neither takes go to the module, whose call then fails: see :func:`refusal_of_module`.
    """
    if loss_fn is None:
        return SharedArguments(args, dict(kwargs), (), {})
    return _shared(_parameters(module), loss_fn, args, kwargs)


def loss_name(loss_fn: LossFunction) -> str:
    """Name of a loss function as messages show it, with its file and line where it is not torch's."""
    found: Any = inspect.unwrap(loss_fn)
    found = getattr(found, "func", found)
    name = getattr(found, "__qualname__", type(found).__name__).rpartition("<locals>.")[2]
    code = getattr(found, "__code__", None)
    if code is None or str(found.__module__).partition(".")[0] == "torch":
        return name
    return f"{name} ({importable_name(code.co_filename)}:{code.co_firstlineno})"


def closed_over_names(loss_fn: LossFunction) -> list[str]:
    """Names and kinds of the objects that a loss function uses besides its arguments; plain values are left out."""
    found = inspect.unwrap(loss_fn)
    held: dict[str, Any] = {}
    if isinstance(found, partial):
        held |= {f"argument {at} of its partial": value for at, value in enumerate(found.args)}
        held |= found.keywords
        found = found.func
    if isinstance(found, MethodType):
        held["self"] = found.__self__
        found = found.__func__
    if isinstance(found, FunctionType):
        variables = inspect.getclosurevars(found)
        held |= {**variables.globals, **variables.nonlocals}
    elif not isinstance(found, BuiltinFunctionType):
        held["self"] = found
    return [f"{name} ({type(value).__name__})" for name, value in held.items() if not isinstance(value, _PLAIN)]


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    """Parameters of a function or of a module's forward; any where Python does not know them."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return list(inspect.signature(called).parameters.values())
    except ValueError:  # a function of C
        return [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]


def _further(loss_fn: LossFunction) -> list[Parameter]:
    """Parameters of a loss function after the module's output."""
    found = _parameters(loss_fn)
    return found[1:] if found and found[0].kind in _BY_POSITION else found


def _shared(
    own: list[Parameter], loss_fn: LossFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> SharedArguments:
    further = _further(loss_fn)
    kinds = {parameter.kind for parameter in own}
    takes_any = Parameter.VAR_KEYWORD in kinds
    places = len(args) if Parameter.VAR_POSITIONAL in kinds else sum(each.kind in _BY_POSITION for each in own)
    taken = {each.name for each in own if each.kind is not Parameter.VAR_POSITIONAL}
    starred = next((each.name for each in further if each.kind is Parameter.VAR_POSITIONAL), None)
    rest_by_name = any(each.kind is Parameter.VAR_KEYWORD for each in further)
    named = {each.name for each in further if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
    closed_over = set(getattr(loss_fn, CLOSED_OVER, ()))

    loss_kwargs = {name: value for name, value in kwargs.items() if name in named | closed_over}
    only_loss = {name for name in loss_kwargs if name in closed_over or (name not in taken and not takes_any)}
    left = [name for name in kwargs if name not in taken and name not in loss_kwargs and not takes_any]
    by_position = list(args[places:])
    module_kwargs = {name: value for name, value in kwargs.items() if name not in only_loss}
    if starred or rest_by_name:
        for name in left:
            value = module_kwargs.pop(name)
            if name == starred and isinstance(value, tuple | list):
                by_position += value
            elif starred and (name == starred or not rest_by_name):
                by_position.append(value)
            else:
                loss_kwargs[name] = value
    loss_args, unplaced = _placed(further, by_position, loss_kwargs)
    module_args = args if unplaced else args[:places]  # all of them, for the message
    return SharedArguments(module_args, module_kwargs, loss_args, loss_kwargs)


def _placed(
    further: list[Parameter], given: list[Any], by_name: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of a loss function by position, which are taken from ``by_name``; and those that have no place.

    A parameter with a default takes none by position: an example too many would silently become its weight or margin.
    """
    starred = any(each.kind is Parameter.VAR_POSITIONAL for each in further)
    waiting, placed = list(given), []
    for parameter in further:
        if parameter.kind not in _BY_POSITION:
            break
        if parameter.name in by_name:
            placed.append(by_name.pop(parameter.name))
        elif waiting and parameter.default is Parameter.empty:
            placed.append(waiting.pop(0))
        elif waiting and starred:
            placed.append(parameter.default)
        else:
            break
    if starred:
        placed, waiting = [*placed, *waiting], []
    return tuple(placed), tuple(waiting)


def refusal_of_module(module: nn.Module, shared: SharedArguments, loss_fn: LossFunction | None) -> str:
    """What forward takes and is given where the two do not agree, else empty."""
    if loss_fn is None:
        remedy = "an example that only a loss takes needs a loss_fn with a parameter for it"
    else:
        remedy = (
            f"loss_fn {loss_name(loss_fn)} takes {_listed(_parameters(loss_fn))}; what only "
            "loss_fn takes must be named as its parameter, or loss_fn be loss_fn(output, *labels)"
        )
    words = _disagreement(_parameters(module), shared.module_args, shared.module_kwargs, ())
    return words and f"forward of {type(module).__name__} {words}; {remedy}"


def refusal_of_loss(loss_fn: LossFunction, shared: SharedArguments) -> str:
    """What the loss function takes and is given where the two do not agree, else empty."""
    by_name = {key: value for key, value in shared.loss_kwargs.items() if key not in getattr(loss_fn, CLOSED_OVER, ())}
    words = _disagreement(_parameters(loss_fn), shared.loss_args, by_name, ("the output",))
    remedy = "give it among the example arguments by the name of the parameter, or after those that forward takes"
    return words and f"loss_fn {loss_name(loss_fn)} {words}; {remedy}"


def _disagreement(
    parameters: list[Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any], first: tuple[str, ...]
) -> str:
    """In words, where the arguments are not those of the parameters; ``first`` are names of further ones before."""
    try:
        inspect.Signature(parameters).bind(*first, *args, **kwargs)
    except TypeError as error:
        names = [each.name for each in parameters if each.kind in _BY_POSITION]
        names += [f"args[{at}]" for at in range(len(names), len(first) + len(args))]
        given = ", ".join([*first, *names[len(first) : len(first) + len(args)], *(f"{name}=..." for name in kwargs)])
        fault = str(error).replace("got an unexpected", "unexpected")
        return f"takes {_listed(parameters)} and is given ({given}): {fault}"
    return ""


def _listed(parameters: list[Parameter]) -> str:
    plain = [each.replace(annotation=Parameter.empty) for each in parameters]
    return str(inspect.Signature(plain))
