"""Tracing a training step to one joint forward and backward ATen graph on fake tensors.

The private torch APIs of tracing are used here and in the modules imported from this folder only:
``aot_export_joint_with_descriptors`` with its input and output descriptors, and the marks it leaves
on the nodes (``partitioner_tag``, ``seq_nr``, ``desc``).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.traceback import preserve_node_meta

from planner.graph.operator_graph import OutputRole, Phase, ValueRole
from planner.torch_adapter.local.rms_norm import rms_norm_as_one_operator
from planner.torch_adapter.tracing.loss_arguments import LossFunction
from planner.torch_adapter.tracing.provenance import Provenance
from planner.torch_adapter.tracing.settings import (
    no_custom_functions,
    quiet_transformers,
    tracing_settings,
    watched_autocast,
)
from planner.torch_adapter.tracing.step_module import StepArguments, StepModule, left_as_found
from planner.torch_adapter.tracing.trace_error import TraceError, translate
from planner.torch_adapter.tracing.transformers_masks import without_packing_checks
from planner.torch_adapter.tracing.wide_gradients import widen_gradients


@dataclass(frozen=True)
class TracedInput:
    """A placeholder of the traced graph."""

    node: Node
    role: ValueRole
    name: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class TracedOutput:
    """An output of the traced graph; ``of`` is the placeholder it belongs to, None for the loss."""

    node: Node
    role: OutputRole
    of: Node | None


@dataclass(frozen=True)
class Trace:
    """A joint graph with the meaning of its inputs and outputs."""

    graph_module: GraphModule
    inputs: tuple[TracedInput, ...]
    outputs: tuple[TracedOutput, ...]
    notes: tuple[str, ...]


def trace_joint_graph(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: LossFunction | None,
    wide_gradients: bool = False,
) -> Trace:
    """Trace forward, loss and backward of ``module`` on fake CPU tensors.

    The module may have real tensors or tensors on ``meta``; it is left as it was found. With ``wide_gradients`` those
    of 16-bit parameters are cast to 32 bits.

    Raises
    ------
    TraceError
        For any reason, with module path and source line.
    """
    provenance = Provenance()
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        arguments = StepArguments.of(module, args, kwargs)
        with ExitStack() as stack:
            stack.enter_context(left_as_found(module))
            step = StepModule(module, arguments, loss_fn, provenance, fake_mode)
            stack.enter_context(fake_mode)
            stack.enter_context(tracing_settings())
            stack.enter_context(quiet_transformers())
            stack.enter_context(preserve_node_meta())
            stack.enter_context(provenance.watching(module))
            stack.enter_context(without_packing_checks(module))
            stack.enter_context(rms_norm_as_one_operator())
            stack.enter_context(no_custom_functions(provenance))
            casts = stack.enter_context(watched_autocast(provenance))
            joint = aot_export_joint_with_descriptors(stack, step, step.example_tensors)
            trace = _read(joint.graph_module, step, arguments)
            if wide_gradients:
                trace = _widened(trace)
            return replace(trace, notes=(*trace.notes, *dict.fromkeys(casts)))
    except Exception as error:
        raise translate(error, provenance.module_path) from error


def phase_of(node: Node) -> Phase:
    """Phase of a traced operator."""
    return Phase.BACKWARD if node.meta.get("partitioner_tag") == "is_backward" else Phase.FORWARD


def sequence_of(node: Node) -> int | None:
    """Autograd's sequence number, which a backward operator shares with its forward one."""
    return node.meta.get("seq_nr")


def result_of(node: Node) -> Any:
    """Fake tensor, or sequence of them, that the node returned while it was traced."""
    return node.meta["val"]


def arguments_of(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a traced operator with fake tensors."""
    args: Any = torch.fx.map_arg(node.args, result_of)
    kwargs: Any = torch.fx.map_arg(node.kwargs, result_of)
    return args, kwargs


def constant_of(graph_module: GraphModule, node: Node) -> Tensor:
    """Data of a tensor that the traced code made or closed over.

    Raises
    ------
    TraceError
        The tensor has no data.
    """
    value: Any = graph_module
    for attribute in str(node.target).split("."):
        value = getattr(value, attribute)
    if isinstance(value, FakeTensor):
        value = value.constant
    if not isinstance(value, Tensor) or value.device.type == "meta":
        raise TraceError(
            f"{node.target}: a tensor that is neither parameter, buffer nor input has no data; "
            "register it with register_buffer"
        )
    return value.detach()


def _read(graph_module: GraphModule, step: StepModule, arguments: StepArguments) -> Trace:
    inputs, notes, of_name = [], [], {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        traced = _input(node, node.meta["desc"], step, arguments)
        inputs.append(traced)
        of_name[_key(node.meta["desc"])] = node
    output = graph_module.graph.output_node()
    returned: Any = output.args[0]
    outputs = []
    for node, description in zip(returned, output.meta["desc"], strict=True):
        if not isinstance(node, Node):
            continue
        if isinstance(description, descriptors.PlainAOTOutput):
            outputs.append(TracedOutput(node, OutputRole.LOSS, None))
        elif isinstance(description, descriptors.GradAOTOutput):
            outputs.append(TracedOutput(node, OutputRole.GRADIENT, of_name[_key(description.grad_of)]))
        elif isinstance(description, descriptors.InputMutationAOTOutput):
            mutated: Any = description.mutated_input
            if isinstance(mutated, descriptors.BufferAOTInput):
                outputs.append(TracedOutput(node, OutputRole.BUFFER_UPDATE, of_name[_key(mutated)]))
            elif isinstance(mutated, descriptors.PlainAOTInput):
                notes.append(
                    f"forward changes its input {arguments.names[mutated.idx]} in place; the change is dropped"
                )
            else:
                name = _state(step, mutated.target).name
                raise TraceError(f"forward changes parameter {name} in place; make it a buffer or do it after the step")
        else:
            raise TraceError(f"the traced graph has an output of unknown meaning: {description}")
    unused = _unused(step, inputs, outputs)
    notes += [f"parameter {name} takes no part in the loss and gets no gradient" for name in unused]
    return Trace(graph_module, tuple(inputs), tuple(outputs), tuple(notes))


def _widened(trace: Trace) -> Trace:
    """The trace with 32-bit gradients in the place of 16-bit ones."""
    gradients = [output.node for output in trace.outputs if output.role is OutputRole.GRADIENT]
    wide = widen_gradients(trace.graph_module.graph, gradients)
    outputs = (
        replace(output, node=wide.get(output.node, output.node)) if output.role is OutputRole.GRADIENT else output
        for output in trace.outputs
    )
    return replace(trace, outputs=tuple(outputs))


def _unused(step: StepModule, inputs: list[TracedInput], outputs: list[TracedOutput]) -> list[str]:
    with_gradient = {output.of for output in outputs if output.role is OutputRole.GRADIENT}
    trained = {state.name for state in step.parameters_of_module if state.tensor.requires_grad}
    return [traced.name for traced in inputs if traced.name in trained and traced.node not in with_gradient]


def _input(node: Node, description: Any, step: StepModule, arguments: StepArguments) -> TracedInput:
    if isinstance(description, descriptors.ParamAOTInput):
        state = _state(step, description.target)
        return TracedInput(node, ValueRole.PARAMETER, state.name, state.aliases)
    if isinstance(description, descriptors.BufferAOTInput):
        state = _state(step, description.target)
        return TracedInput(node, ValueRole.BUFFER, state.name, state.aliases)
    if isinstance(description, descriptors.PlainAOTInput):
        return TracedInput(node, ValueRole.INPUT, arguments.names[description.idx])
    if isinstance(description, descriptors.TangentAOTInput):
        return TracedInput(node, ValueRole.TANGENT, "tangent")
    raise TraceError(f"the traced graph has an input of unknown meaning: {description}")


def _state(step: StepModule, target: str) -> Any:
    group = step.parameters_of_module if target[0] == "p" else step.buffers_of_module
    return group[int(target[1:])]


def _key(description: Any) -> tuple[str, object]:
    return type(description).__name__, getattr(description, "target", getattr(description, "idx", None))
