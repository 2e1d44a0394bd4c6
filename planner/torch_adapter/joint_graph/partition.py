"""The joint graph of a training step cut into forward and backward, as torch does and as a decision says.

Torch's own cut finds what is cheapest to keep where elementwise operators are computed again for nothing
(``min_cut_rematerialization_partition``). A decision is laid over it by the marks that selective checkpointing uses:
nodes that must be kept and nodes that must be computed again; torch's cut then decides the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch._functorch import partitioners
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from planner.graph.kernel_graph import KernelGraph
from planner.torch_adapter.joint_graph.kernel_reader import read_kernels, tensors_of
from planner.torch_adapter.tracing.graph_builder import dtype_name

_MARK = "recompute"
_MARKS = (_MARK, "ac_graph_id")
"""What checkpoints inside the model leave on nodes."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A forward and a backward graph, and both as kernels.

    Parameters
    ----------
    forward, backward
        For torch to compile.
    forward_kernels, backward_kernels
        The same as kernels; what the backward is given goes by the names of the forward.
    gradients
        Elements and dtype (torch's name) of every gradient of an input.
    """

    forward: GraphModule
    backward: GraphModule
    forward_kernels: KernelGraph
    backward_kernels: KernelGraph
    gradients: tuple[tuple[int, str], ...]


def default_cut(joint: GraphModule, inputs: Any, options: Mapping[str, Any], inlined: bool) -> Cut:
    """The cut that torch makes, of a copy of the joint graph.

    Parameters
    ----------
    joint, inputs, options
        As a partitioner gets them.
    inlined
        As for :func:`read_kernels`.

    Raises
    ------
    CompileError
        A shape is symbolic.
    """
    return _cut(_copied(joint), inputs, options, inlined)


def cut_by(
    joint: GraphModule,
    inputs: Any,
    options: Mapping[str, Any],
    inlined: bool,
    kept: Iterable[str],
    again: Iterable[tuple[tuple[str, ...], tuple[str, ...]]],
) -> Cut:
    """The cut with the results of some nodes kept, and others computed again.

    Parameters
    ----------
    joint, inputs, options, inlined
        As for :func:`default_cut`.
    kept
        Names of nodes.
    again
        Kernels that run again: names of their nodes, and which of these are read in the backward.
    """
    marked = _copied(joint)
    nodes = {node.name: node for node in marked.graph.nodes}
    for name in kept:
        if name in nodes:  # torch's cut removes duplicates, never what it keeps
            nodes[name].meta[_MARK] = CheckpointPolicy.MUST_SAVE
    for operators, wanted in again:
        for node in _closure([nodes[name] for name in wanted], set(operators)):
            node.meta[_MARK] = CheckpointPolicy.MUST_RECOMPUTE
    return _cut(marked, inputs, options, inlined)


def _copied(joint: GraphModule) -> GraphModule:
    """A copy of a graph, with the same tensors as constants and without marks: the plan decides what runs again."""
    graph = copy.deepcopy(joint.graph)
    for node in graph.nodes:
        for mark in _MARKS:
            node.meta.pop(mark, None)
    return GraphModule(joint, graph)


def _closure(wanted: list[Node], inside: set[str]) -> list[Node]:
    """Nodes of a kernel that are computed for some of its values, and the views between them."""
    found: dict[Node, None] = {}
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node not in found and (node.name in inside or _reads(node, inside)):
            found[node] = None
            stack.extend(node.all_input_nodes)
    return list(found)


def _reads(node: Node, inside: set[str]) -> bool:
    """Whether a node is a view of a kernel's value: one tensor that is, through views, from inside."""
    while node.op == "call_function" and node.name not in inside and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.name in inside


def _cut(joint: GraphModule, inputs: Any, options: Mapping[str, Any], inlined: bool) -> Cut:
    # What draws random numbers never runs again, but torch takes every attention for random and would keep its state.
    with patch.object(partitioners, "has_recomputable_rng_ops", return_value=False):
        forward, backward = partitioners.min_cut_rematerialization_partition(joint, inputs, **options)
    first = read_kernels(forward, inlined, returned=options["num_fwd_outputs"])
    placeholders = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    roots = {name: first.roots[name] for name in placeholders if name in first.roots}
    outputs: Any = backward.graph.output_node().args[0]
    gradients = [t for node in outputs if isinstance(node, Node) for t in tensors_of(node)]
    counted = tuple((tensor.numel(), dtype_name(tensor)) for tensor in gradients)
    return Cut(forward, backward, first, read_kernels(backward, inlined, roots), counted)
