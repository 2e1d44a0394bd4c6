"""From an unmodified module to the joint forward and backward graph of its training step.

The step is traced once on fake CPU tensors (:mod:`planner.torch_adapter.tracing.trace`), so that parameters
need no memory and no device is needed; the trace then becomes the project's own graph
(:mod:`planner.torch_adapter.tracing.graph_builder`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.graph.operator_graph import OperatorGraph, ValueRole
from planner.torch_adapter.local.calls import OperatorCall
from planner.torch_adapter.tracing.fingerprint import fingerprint
from planner.torch_adapter.tracing.graph_builder import GraphBuilder, dtype_name
from planner.torch_adapter.tracing.loss_arguments import LossFunction
from planner.torch_adapter.tracing.step_module import StepArguments, uncompiled
from planner.torch_adapter.tracing.trace import trace_joint_graph
from planner.torch_adapter.tracing.trace_error import TraceError

__all__ = ["TraceError", "TracedStep", "input_tensors", "trace_step"]


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A training step as a graph, and how to execute each of its operators.

    Parameters
    ----------
    graph
        Operators, values, inputs and outputs.
    calls
        One call per operator, in the same order.
    fingerprint
        SHA-256 of the content of the graph; the same for the same model in every process.
    seconds
        Time that tracing took.
    constants
        Data of the inputs that are no tensors of the module: name (as in the graph) to tensor.
    """

    graph: OperatorGraph
    calls: tuple[OperatorCall, ...]
    fingerprint: str
    seconds: float
    constants: Mapping[str, Tensor]

    def __repr__(self) -> str:
        return f"<traced step {self.fingerprint[:12]}: {self.graph!r}>"


def trace_step(
    module: nn.Module,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    reduce_dtype: str | None = "float32",
) -> TracedStep:
    """Trace forward, loss and backward of one training step.

    Parameters
    ----------
    module
        Any module, with real tensors or on ``meta``; it is not changed.
    example_args, example_kwargs
        Arguments of its forward with the shapes and dtypes of training; values are not read.
    loss_fn
        Maps the module's output to a scalar loss; further parameters of it (``labels``, say) are filled by name from
        ``example_kwargs``, and by position, ``*labels`` included, with the examples that the module does not take.
        It may use the module. None: the output is the loss or has it as ``.loss``.
    reduce_dtype
        Dtype in which gradients of 16-bit parameters are summed over devices, and given to the optimizer: "float32", or
        that of the parameters.

    Returns
    -------
    TracedStep

    Raises
    ------
    TraceError
        The step cannot be traced: arguments that neither the module nor the loss function takes, control flow or
        shapes that depend on data, a custom autograd function, a loss that is no scalar, an operator torch cannot
        trace.
    """
    started = time.perf_counter()
    trace = trace_joint_graph(
        uncompiled(module), tuple(example_args), dict(example_kwargs or {}), loss_fn, reduce_dtype == "float32"
    )
    builder = GraphBuilder(trace)
    graph = builder.build()
    calls = tuple(builder.calls)
    digest = fingerprint(graph, calls)
    return TracedStep(graph, calls, digest, time.perf_counter() - started, builder.constants)


def input_tensors(
    traced: TracedStep,
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Tensor]:
    """Tensors of the graph's inputs, in order: parameters, buffers, example tensors, constants, tangents.

    Parameters
    ----------
    traced
        The traced step.
    module
        A module of the traced structure with real tensors; they are detached, not copied.
    args, kwargs
        Arguments of one step with the traced shapes.

    Raises
    ------
    ValueError
        A tensor is missing or has another shape or dtype than traced.
    """
    module = uncompiled(module)
    arguments = StepArguments.of(module, tuple(args), dict(kwargs or {}))
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    by_role = {
        ValueRole.PARAMETER: dict(named),
        ValueRole.INPUT: dict(zip(arguments.names, arguments.tensors, strict=True)),
    }
    by_role[ValueRole.BUFFER] = {**by_role[ValueRole.PARAMETER], **traced.constants}
    tensors = []
    for index in traced.graph.inputs:
        value = traced.graph.values[index]
        if value.role is ValueRole.TANGENT:
            tensors.append(torch.ones(value.spec.shape, dtype=getattr(torch, value.spec.dtype)))
            continue
        tensor = by_role[value.role].get(value.name)
        if tensor is None:
            raise ValueError(
                f"{value.role} {value.name} is in the traced step, but not in the module and arguments given"
            )
        if tuple(tensor.shape) != value.spec.shape or dtype_name(tensor) != value.spec.dtype:
            raise ValueError(
                f"{value.role} {value.name}: traced as {value.spec.dtype} {value.spec.shape}, "
                f"got {dtype_name(tensor)} {tuple(tensor.shape)}; trace the step again with these shapes"
            )
        tensors.append(tensor.detach())
    return tensors
