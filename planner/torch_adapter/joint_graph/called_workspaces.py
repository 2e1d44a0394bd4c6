"""Bytes that kernels of libraries hold while they run, beyond arguments and results: measured by running them.

A convolution on the CPU brings its arguments into layouts of its own and sums in parts, one per thread. What that
takes depends on the library's version, the processor and the number of threads, so it follows from no rule.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from planner.graph.operator_classes import OperatorClass, operator_class
from planner.torch_adapter.joint_graph.kernel_reader import tensors_of
from planner.torch_adapter.meters.allocations import most_allocated


def called_workspaces(graph: GraphModule) -> dict[str, int]:
    """Bytes that convolutions on the CPU hold beyond arguments and results, by the name of the node.

    Of those with the same shapes, layouts and options one is run, on zeros.

    Parameters
    ----------
    graph
        A graph with fake tensors of fixed shapes on its nodes.
    """
    alike: dict[str, list[Node]] = {}
    for node in graph.graph.nodes:
        if operator_class(str(node.target)) is OperatorClass.CONVOLUTION and _is_on_cpu(node):
            alike.setdefault(f"{node.target}{_arguments(node, _layout)}", []).append(node)
    # Its own thread has neither fake tensors nor autocast, nor a profiler that is on already.
    with ThreadPoolExecutor(max_workers=1) as thread:
        measured = list(thread.map(_workspace, (nodes[0] for nodes in alike.values())))
    return {node.name: nbytes for nodes, nbytes in zip(alike.values(), measured, strict=True) for node in nodes}


def _workspace(node: Node) -> int:
    target: Any = node.target
    args = _arguments(node, _zeros)
    torch.get_num_threads()  # a new thread takes the process's number when it is asked for it
    returned: list[Tensor] = []

    def run() -> None:
        result = target(*args)
        returned.extend(each for each in (result if isinstance(result, tuple) else (result,)) if each is not None)

    most = most_allocated(run)
    return max(0, most - sum(tensor.untyped_storage().nbytes() for tensor in returned))


def _is_on_cpu(node: Node) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors_of(node))


def _arguments(node: Node, change: Callable[[Any], Any]) -> Any:
    """Arguments with each fake tensor changed."""
    return map_arg(node.args, lambda source: change(source.meta["val"]))


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _zeros(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
