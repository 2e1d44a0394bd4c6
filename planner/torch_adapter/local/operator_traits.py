"""Properties of an ATen overload: whether it aliases its input or draws random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_UNDECLARED_VIEWS = frozenset(
    {
        _aten._unsafe_view.default,
        _aten.unsafe_split.Tensor,
        _aten.unsafe_split_with_sizes.default,
        _aten.unsafe_chunk.default,
    }
)
"""Views whose schema declares no alias because autograd does not need it."""

_SOFTMAX = frozenset(
    {
        _aten._softmax.default,
        _aten._log_softmax.default,
        _aten._softmax_backward_data.default,
        _aten._log_softmax_backward_data.default,
    }
)


def softmax_dim(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Dimension over which a softmax or its gradient sums, counted from the front; None for other operators."""
    if target not in _SOFTMAX:
        return None
    dim: int = arguments_by_name(target, args, kwargs)["dim"] % max(1, args[0].dim())
    return dim


def is_view(target: torch._ops.OpOverload) -> bool:
    """Whether every result aliases the storage of the first tensor argument."""
    returns = target._schema.returns
    declared = bool(returns) and all(ret.alias_info is not None and not ret.alias_info.is_write for ret in returns)
    return declared or target in _UNDECLARED_VIEWS


def draws_random_numbers(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers; attention and dropout kernels with probability 0 draw none."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = arguments_by_name(target, args, kwargs)
    chances = [given[name] for name in ("dropout_p", "p") if name in given]
    return 0.0 not in chances and given.get("train") is not False


def returned_tensors(
    target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[Tensor | None, ...]:
    """Tensors that the kernel returns, by position.

    Fake backward operators return a tensor also for some gradients that ``output_mask`` leaves out, where the kernels
    return none.
    """
    if isinstance(result, Tensor):
        return (result,)
    wanted = arguments_by_name(target, args, kwargs).get("output_mask") or [True] * len(result)
    return tuple(
        tensor if isinstance(tensor, Tensor) and kept else None for tensor, kept in zip(result, wanted, strict=True)
    )


def arguments_by_name(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Value of every argument of the schema, defaults included."""
    arguments = target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    positional = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    return defaults | positional | kwargs
