"""Gradients of 16-bit parameters become 32-bit ones before anything sums them over devices.

A sum of many 16-bit numbers in 16 bits loses the small ones, so FSDP2 and DDP users set ``reduce_dtype``. Here a cast
is an operator of the step: it follows the operator that makes the gradient, ahead of views and of sums of the
gradients of a tied parameter. A plan may place it as any operator, but it takes what its producer made without a
collective (:attr:`planner.graph.operator_graph.OperatorGraph.gradient_casts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from planner.torch_adapter.local.operator_traits import is_view

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_CAST = _aten._to_copy.default


def widen_gradients(graph: Graph, gradients: Iterable[Node]) -> dict[Node, Node]:
    """Insert casts to 32 bits into a joint graph, whose outputs stay as they are.

    Parameters
    ----------
    graph
        The joint graph.
    gradients
        Its outputs that are gradients of parameters.

    Returns
    -------
    dict
        32-bit nodes by the 16-bit ones, among them every 16-bit gradient.
    """
    wide: dict[Node, Node] = {}
    for gradient in gradients:
        if _is_half(gradient):
            _widen(graph, gradient, wide)
    return wide


def _widen(graph: Graph, node: Node, wide: dict[Node, Node]) -> None:
    """Add a node of the same value in 32 bits; several gradients may be views of one tensor, which is cast once."""
    if node not in wide:
        wide[node] = _in_32_bits(graph, node, wide)


def _in_32_bits(graph: Graph, node: Node, wide: dict[Node, Node]) -> Node:
    source = node.args[0] if node.args else None
    alone = node.op == "call_function" and len(node.users) == 1
    if alone and isinstance(source, Node):
        if node.target is _CAST and set(node.kwargs) == {"dtype"} and _value(source).dtype is torch.float32:
            return source
        if _passes_through(node) and _is_half(source):
            _widen(graph, source, wide)
            return _again(graph, node, wide)
        summands = [each for each in node.args if isinstance(each, Node) and _is_half(each)]
        if node.target is _aten.add.Tensor and not node.kwargs and len({*summands}) == 2 and _same_shapes(summands):
            for each in summands:
                _widen(graph, each, wide)
            return _again(graph, node, wide)
    with graph.inserting_after(node):
        cast = graph.call_function(_CAST, (node,), {"dtype": torch.float32})
    cast.meta = {**node.meta, "val": _value(node).to(torch.float32)}
    return cast


def _again(graph: Graph, node: Node, wide: dict[Node, Node]) -> Node:
    """The operator once more, with 32-bit tensors in the place of some arguments."""
    target: Any = node.target
    taken: Any = map_arg((node.args, node.kwargs), lambda each: wide.get(each, each))
    with graph.inserting_after(node):
        made = graph.call_function(target, *taken)
    args, kwargs = map_arg(taken, _value)
    made.meta = {**node.meta, "val": target(*args, **kwargs)}
    return made


def _same_shapes(nodes: Sequence[Node]) -> bool:
    return len({_value(node).shape for node in nodes}) == 1


def _passes_through(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_view(node.target) and isinstance(_value(node), Tensor)


def _is_half(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in _HALF


def _value(node: Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value
