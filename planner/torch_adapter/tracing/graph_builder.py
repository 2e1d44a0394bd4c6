"""Construction of the project's own graph from a trace.

Views are marked, ``getitem`` is folded away, dead operators go, constants become inputs, and every
operator gets a stable identity, its FLOP, its source line and the call that executes it.
"""

from __future__ import annotations

import operator as python_operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from planner.graph.operator_graph import (
    ITEM_BYTES,
    GraphOutput,
    Operator,
    OperatorGraph,
    OutputRole,
    Phase,
    TensorSpec,
    Value,
    ValueRole,
)
from planner.torch_adapter.local.calls import OperatorCall, Slot
from planner.torch_adapter.local.counter_random import RANDOM_OPERATORS, without_counter_form
from planner.torch_adapter.local.operator_traits import draws_random_numbers, is_view, returned_tensors, softmax_dim
from planner.torch_adapter.tracing.flops import operator_flops
from planner.torch_adapter.tracing.provenance import module_path_of, source_of
from planner.torch_adapter.tracing.trace import Trace, arguments_of, constant_of, phase_of, result_of, sequence_of
from planner.torch_adapter.tracing.trace_error import TraceError

_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that are written down as they are; a symbolic number or a generator is none of them."""


def dtype_name(tensor: Tensor) -> str:
    """Name of the dtype without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")


def _constant_notes(constants: Mapping[str, Tensor]) -> tuple[str, ...]:
    """A note on tensors that are the same in every step, though they may be data; single numbers are none."""
    large = [tensor for tensor in constants.values() if tensor.numel() > 1]
    found = list(dict.fromkeys(f"{dtype_name(each)} of shape {tuple(each.shape)}" for each in large))
    if not found:
        return ()
    named = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return (
        f"tensors that are no parameters, buffers or arguments are the same in every step: {named}; "
        "make labels a parameter of the loss, loss_fn(output, labels), and register other tensors as buffers",
    )


class GraphBuilder:
    """Turns a trace into an :class:`OperatorGraph`, one call per operator and the constants' data."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._values: list[Value] = []
        self._operators: list[Operator] = []
        self._results: dict[Node, int | tuple[int | None, ...] | None] = {}
        self._occurrences: Counter[str] = Counter()
        self._forward_of_sequence: dict[int, int] = {}
        self.calls: list[OperatorCall] = []
        self.constants: dict[str, Tensor] = {}

    def build(self) -> OperatorGraph:
        """Build the graph; :attr:`calls` and :attr:`constants` are filled on the way."""
        nodes = self._live_nodes()
        self._add_inputs()
        self._add_constants([node for node in nodes if node.op == "get_attr"])
        inputs = tuple(range(len(self._values)))
        called = [node for node in nodes if node.op == "call_function"]
        for phase in Phase:
            for node in called:
                if phase_of(node) is phase:
                    self._add_call(node, phase)
        notes = (*self._trace.notes, *_constant_notes(self.constants))
        return OperatorGraph(tuple(self._values), tuple(self._operators), inputs, self._outputs(), notes)

    def _live_nodes(self) -> list[Node]:
        live = {output.node for output in self._trace.outputs}
        for node in reversed(self._trace.graph_module.graph.nodes):
            if node in live:
                live.update(node.all_input_nodes)
        return [node for node in self._trace.graph_module.graph.nodes if node in live]

    def _add_inputs(self) -> None:
        with_gradient = {output.of for output in self._trace.outputs if output.role is OutputRole.GRADIENT}
        for traced in self._trace.inputs:
            trainable = traced.role is ValueRole.PARAMETER and traced.node in with_gradient
            tensor = result_of(traced.node)
            self._results[traced.node] = self._add_value(
                traced.name, tensor, traced.role, trainable=trainable, aliases=traced.aliases
            )

    def _add_constants(self, nodes: list[Node]) -> None:
        for position, node in enumerate(nodes):
            name = f"constant.{position}"
            self.constants[name] = constant_of(self._trace.graph_module, node)
            self._results[node] = self._add_value(name, self.constants[name], ValueRole.BUFFER)

    def _add_value(
        self,
        name: str,
        tensor: Tensor,
        role: ValueRole,
        producer: int | None = None,
        output_index: int = 0,
        trainable: bool = False,
        aliases: tuple[str, ...] = (),
    ) -> int:
        dtype, supported = dtype_name(tensor), ", ".join(ITEM_BYTES)
        if dtype not in ITEM_BYTES or tensor.layout is not torch.strided:
            raise TraceError(
                f"{name} is a {tensor.layout} tensor of dtype {dtype}; supported are dense tensors of {supported}, "
                "also as gradients (sparse=False)"
            )
        spec = TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), dtype)
        index = len(self._values)
        self._values.append(Value(index, name, spec, role, producer, output_index, trainable, aliases))
        return index

    def _add_call(self, node: Node, phase: Phase) -> None:
        if node.target is python_operator.getitem:
            source, position = node.args
            self._results[node] = self._element(source, position)
            return
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise TraceError(
                f"{_place(node)}: {target} is no ATen operator and has no plan; write it with torch operators"
            )
        template = _Template(self._results)
        args, kwargs = template.fill(node.args), template.fill(node.kwargs)
        index = len(self._operators)
        forward = self._pair(node, phase, index)
        module_path = self._module_path(node)
        base = f"{module_path}/{phase}/{target}"
        identity = f"{base}/{self._occurrences[base]}"
        self._occurrences[base] += 1
        fake_args, fake_kwargs = arguments_of(node)
        is_random = draws_random_numbers(target, fake_args, fake_kwargs)
        if is_random and str(target) not in RANDOM_OPERATORS:
            raise TraceError(f"{_place(node)}: {without_counter_form(str(target))}")
        returned = returned_tensors(target, fake_args, fake_kwargs, result_of(node))
        self._operators.append(
            Operator(
                index=index,
                identity=identity,
                node_name=node.name,
                target=str(target),
                module_path=module_path,
                phase=phase,
                inputs=tuple(template.inputs),
                outputs=self._add_outputs(node, identity, index, returned),
                is_view=is_view(target),
                is_random=is_random,
                flops=operator_flops(target, fake_args, fake_kwargs, result_of(node)),
                forward=forward,
                source=source_of(node),
                softmax_dim=softmax_dim(target, fake_args, fake_kwargs),
            )
        )
        self.calls.append(OperatorCall.from_template(target, args, kwargs))

    def _element(self, source: Any, position: Any) -> int | None:
        results = self._results[source]
        assert isinstance(results, tuple)
        element: int | None = results[position]
        return element

    def _add_outputs(
        self, node: Node, identity: str, index: int, tensors: tuple[Tensor | None, ...]
    ) -> tuple[int | None, ...]:
        values = tuple(
            None
            if tensor is None
            else self._add_value(f"{identity}#{position}", tensor, ValueRole.ACTIVATION, index, position)
            for position, tensor in enumerate(tensors)
        )
        self._results[node] = values[0] if isinstance(result_of(node), Tensor) else values
        return values

    def _pair(self, node: Node, phase: Phase, index: int) -> int | None:
        sequence = sequence_of(node)
        if sequence is None or module_path_of(node) is None:
            return None
        if phase is Phase.BACKWARD:
            return self._forward_of_sequence.get(sequence)
        # Operators without a gradient carry the number of the differentiable one before them.
        self._forward_of_sequence.setdefault(sequence, index)
        return None

    def _module_path(self, node: Node) -> str:
        """Recorded path; autograd's own sums of gradients have the path of their last summand."""
        path = module_path_of(node)
        if path is not None:
            return path
        producers = [producer for producer in map(self._producer, node.all_input_nodes) if producer is not None]
        return self._operators[max(producers)].module_path if producers else ""

    def _producer(self, node: Node) -> int | None:
        result = self._results[node]
        first = next((value for value in result if value is not None), None) if isinstance(result, tuple) else result
        return None if first is None else self._values[first].producer

    def _outputs(self) -> tuple[GraphOutput, ...]:
        outputs = []
        for output in self._trace.outputs:
            value, of = self._results[output.node], None if output.of is None else self._results[output.of]
            assert isinstance(value, int)
            assert of is None or isinstance(of, int)
            outputs.append(GraphOutput(output.role, value, of))
        return tuple(outputs)


def _place(node: Node) -> str:
    return f"module {module_path_of(node) or '(root)'} ({source_of(node)})"


class _Template:
    """Replaces the tensors of fx arguments by slots, and collects their values in order."""

    def __init__(self, results: Mapping[Node, Any]) -> None:
        self._results = results
        self.inputs: list[int] = []

    def fill(self, argument: Any) -> Any:
        """Plain Python containers with a :class:`Slot` for every tensor, in the order of a pytree."""
        if isinstance(argument, Node):
            value = self._results[argument]
            if not isinstance(value, int):
                raise TraceError(f"{argument}: a list of tensors is an argument as a whole, not tensor by tensor")
            self.inputs.append(value)
            return Slot(len(self.inputs) - 1)
        if isinstance(argument, tuple):
            return tuple(self.fill(item) for item in argument)
        if isinstance(argument, list):
            return [self.fill(item) for item in argument]
        if isinstance(argument, dict):
            return {key: self.fill(item) for key, item in argument.items()}
        if not isinstance(argument, _CONSTANTS):
            raise TraceError(f"an operator has an argument of type {type(argument).__name__}, which no plan can hold")
        return argument
