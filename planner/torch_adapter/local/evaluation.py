"""Operators of a traced training step as they compute in evaluation."""

from __future__ import annotations

from typing import Any

from planner.torch_adapter.local.calls import OperatorCall
from planner.torch_adapter.local.context import bind, call_with
from planner.torch_adapter.local.operator_traits import draws_random_numbers

_CHANGES: dict[str, dict[str, Any]] = {
    "aten.native_dropout.default": {"train": False},
    "aten._native_batch_norm_legit_functional.default": {"training": False},
    "aten.native_batch_norm.default": {"training": False},
}
"""Constants that differ in evaluation: dropout keeps every element, a batch norm reads its running statistics."""


def evaluation_call(call: OperatorCall, tensors: int) -> OperatorCall | None:
    """The call in evaluation; None for a random one that has no counterpart there.

    Parameters
    ----------
    call
        A forward operator, traced in training mode.
    tensors
        Number of its tensor arguments.
    """
    changes = _CHANGES.get(str(call.target))
    if changes is not None:
        return call_with(call.target, {**bind(call, tensors), **changes})
    args, kwargs = call.template()
    return None if draws_random_numbers(call.target, args, kwargs) else call
