"""Errors of tracing a training step, each in one line with its remedy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from planner.torch_adapter.tracing.provenance import source_of_traceback


class TraceError(ValueError):
    """The training step cannot be traced; the message names the place and a remedy."""


_CONTROL_FLOW = (
    "control flow depends on the values of a tensor; replace the branch by torch.where, compute the Python value "
    "outside forward and pass it in, or return a tensor instead of calling .item()"
)
_DYNAMIC_SHAPE = (
    "the shape of the result of {operator} depends on the values of a tensor; use a form with a fixed size "
    "(a mask and torch.where, or a fixed capacity per expert instead of nonzero and boolean indexing)"
)


def translate(error: Exception, module_path: str, function: str = "", closed_over: Sequence[str] = ()) -> TraceError:
    """The :class:`TraceError` of any exception during tracing, with module and source line.

    Parameters
    ----------
    error
        The exception, with its traceback.
    module_path
        Path of the innermost module that was running.
    function
        What was running in place of a module.
    closed_over
        What the function closes over, in words.
    """
    if isinstance(error, TraceError):
        return error
    source = source_of_traceback(error.__traceback__)
    place = (function or f"module {module_path or '(root)'}") + (f" ({source})" if source else "")
    return TraceError(f"{place}: {_reason(error, closed_over)}")


def _reason(error: Exception, closed_over: Sequence[str]) -> str:
    if isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode):
        return _CONTROL_FLOW
    if isinstance(error, DynamicOutputShapeException):
        return _DYNAMIC_SHAPE.format(operator=error.func)
    if isinstance(error, UnsupportedOperatorException):
        return f"operator {error.func} cannot run on tensors without data; register a fake implementation for it"
    message = str(error).strip().splitlines()
    first = message[0] if message else "no message"
    if "device" in first and closed_over:
        return (
            f"{first}; loss_fn closes over {', '.join(closed_over)}, where a tensor was not found and made an input of "
            "the step: make the tensor a parameter, loss_fn(output, labels) with labels in example_kwargs, or close "
            "over the tensor itself, a list, a dict or an attribute of an object that has it"
        )
    if "device" in first:
        return (
            f"{first}; create tensors on the device of an input (x.device), and register tensors that are plain "
            "attributes of a module with register_buffer"
        )
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory while building the graph; use a device without storage (meta) for the parameters"
    return f"{type(error).__name__}: {first}"
