"""Kernels of a forward or backward graph that ``torch.compile`` is about to generate code for.

Generated code computes chains of elementwise operators and reductions in one kernel, and what only that kernel reads
never exists in memory. So a graph is read as *kernels*: every operator that is called as it stands (a matrix product,
attention) is one, and connected operators that can be generated together are one.

Operators are generated together only if no called operator stands between them. So every operator has a level: the
number of called operators on the longest path before it. Those that could run later are moved up to the first level
at which their result is read. An elementwise result that only generated kernels read is not stored for those of other
levels either: they compute it again, if it is made of few stored tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import networkx as nx
import torch
from torch import Tensor
from torch._functorch.partitioners import get_default_op_list
from torch.fx import GraphModule, Node

from planner.graph.kernel_graph import CompileError, Kernel, KernelGraph, Tensors
from planner.graph.operator_classes import OperatorClass, operator_class
from planner.torch_adapter.joint_graph.in_place import overwritten
from planner.torch_adapter.local.operator_traits import draws_random_numbers, is_view
from planner.torch_adapter.tracing.flops import operator_flops
from planner.torch_adapter.tracing.graph_builder import dtype_name
from planner.torch_adapter.tracing.trace import arguments_of

_GENERATED_TOO = frozenset(
    {"embedding", "slice_scatter", "select_scatter", "constant_pad_nd"}
    | {"inductor_random", "inductor_randint", "inductor_lookup_seed"}
)
"""Operators that are generated together with others beside those that torch's partitioner lists."""

_REDUCTIONS = frozenset({"prepare_softmax_online", "scatter_upon_const_tensor"})
"""Reductions beside those of :class:`~planner.graph.operator_classes.OperatorClass`."""

MOST_READS = 4
"""Stored tensors of which a result may be made that kernels of other levels compute again (inductor's
``realize_reads_threshold``)."""


def read_kernels(
    module: GraphModule, inlined: bool = True, roots: Mapping[str, str] | None = None, returned: int | None = None
) -> KernelGraph:
    """Read a forward or backward graph.

    Parameters
    ----------
    module
        The graph, with fake tensors on its nodes.
    inlined
        Whether operators are generated together; else every operator is a kernel.
    roots
        Per placeholder the value whose memory it has, by name, where that is another.
    returned
        Outputs that are returned; the others are kept for the backward. All if None.

    Raises
    ------
    CompileError
        A shape is symbolic.
    """
    return _Reader(module, inlined, roots or {}, returned).read()


def tensors_of(node: Node) -> list[Tensor]:
    """Fake tensors that a node returns."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    return [each for each in value if isinstance(each, Tensor)] if isinstance(value, (list, tuple)) else []


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors as torch allocates them: from the first to the last element."""
    return sum(_bytes(tensor) for tensor in tensors)


class _Reader:
    def __init__(self, module: GraphModule, inlined: bool, roots: Mapping[str, str], returned: int | None) -> None:
        self._nodes: list[Node] = list(module.graph.nodes)
        outputs = list(_flat(module.graph.output_node().args))
        self._results = [node for node in outputs[:returned] if isinstance(node, Node)]
        self._kept = [] if returned is None else [node for node in outputs[returned:] if isinstance(node, Node)]
        self._types, self._inlined, self._names = get_default_op_list(), inlined, roots
        self._root: dict[Node, Node] = {}
        self._level: dict[Node, int] = {}
        self._kernel = nx.utils.UnionFind()
        self._leaves: dict[Node, tuple[Node, ...]] = {}

    def read(self) -> KernelGraph:
        """Read it."""
        calls = [node for node in self._nodes if node.op == "call_function"]
        for node in self._nodes:
            if node.op != "output":
                self._refuse_symbols(node)
                self._root[node] = self._root_of(node)
        owners = [node for node in calls if self._root[node] is node]
        self._set_levels(owners)
        self._set_leaves(owners)
        stored = [node for node in owners if node not in self._leaves]
        for node in filter(self._is_generated, stored):
            for source in self._read_by(node):
                if self._is_generated(source) and self._level[source] == self._level[node]:
                    self._kernel.union(source, node)
        return self._graph(owners, stored)

    def _refuse_symbols(self, node: Node) -> None:
        value = node.meta.get("val")
        symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        if symbolic or any(isinstance(size, torch.SymInt) for tensor in tensors_of(node) for size in tensor.shape):
            raise CompileError(
                f"{node.name} has a symbolic shape, for which bytes are not known: compile with dynamic=False, "
                "and give batches of one shape"
            )

    def _root_of(self, node: Node) -> Node:
        """Node that made the storage of a node's result."""
        if node.op == "call_function" and node.args and isinstance(node.args[0], Node):
            source = node.args[0]
            if node.target is operator.getitem:
                return self._root[source] if _is_view(source) or self._is_generated(source) else node
            if _is_view(node):
                return self._root[source]
        return node

    def _sources(self, node: Node) -> list[Node]:
        """Nodes whose memory a node reads; what one operator returns as several tensors is several."""
        return list(dict.fromkeys(self._root[source] for source in node.all_input_nodes))

    def _called(self, node: Node) -> Node:
        """The operator behind one of several results."""
        source = node.args[0] if node.target is operator.getitem else node
        assert isinstance(source, Node)
        return source

    def _is_generated(self, node: Node) -> bool:
        if node.op != "call_function" or node.target is operator.getitem or not self._inlined:
            return False
        name = getattr(node.target, "__name__", "").split(".")[0]
        return bool(self._types.is_fusible(node)) or name in _GENERATED_TOO

    def _is_called(self, node: Node) -> bool:
        return node.op == "call_function" and not self._is_generated(self._called(node))

    def _set_levels(self, owners: list[Node]) -> None:
        for node in owners:
            if node.target is operator.getitem:
                self._level[node] = self._level[self._called(node)]
                continue
            known = [self._level[s] + self._is_called(s) for s in self._sources(node) if s in self._level]
            self._level[node] = max(known, default=0)
        readers: dict[Node, list[Node]] = {node: [] for node in owners}
        for node in owners:
            for source in self._sources(node):
                if source in readers:
                    readers[source].append(node)
        for node in reversed(owners):
            if self._is_generated(node) and readers[node]:
                self._level[node] = max(self._level[node], min(self._level[reader] for reader in readers[node]))

    def _set_leaves(self, owners: list[Node]) -> None:
        """Find elementwise results that are computed where they are read, and the stored tensors they are made of."""
        stored = {self._root[node] for node in (*self._results, *self._kept)}
        stored.update(source for node in owners if not self._is_generated(node) for source in self._sources(node))
        for node in owners:
            if node not in stored and self._is_generated(node) and not _is_reduction(node):
                made_of = self._read_by(node)
                if len(made_of) <= MOST_READS:
                    self._leaves[node] = made_of

    def _read_by(self, node: Node) -> tuple[Node, ...]:
        """Stored tensors that an operator reads, itself or through what is computed where it reads it."""
        leaves = (leaf for source in self._sources(node) for leaf in self._leaves.get(source, (source,)))
        return tuple(dict.fromkeys(leaves))

    def _with_inlined(self, nodes: list[Node]) -> list[Node]:
        """Stored results of a kernel, and before them what is computed for them alone."""
        found = dict.fromkeys(nodes)
        stack = list(nodes)
        while stack:
            for source in self._sources(stack.pop()):
                if source in self._leaves and source not in found:
                    found[source] = None
                    stack.append(source)
        return [node for node in found if node in self._leaves] + nodes

    def _graph(self, owners: list[Node], stored: list[Node]) -> KernelGraph:
        members: dict[Node, list[Node]] = {}
        for node in stored:
            members.setdefault(self._kernel[self._called(node)], []).append(node)
        of = {node: kernel for kernel, nodes in members.items() for node in nodes}
        reads: dict[Node, list[Node]] = {}
        for kernel, nodes in members.items():
            found = (source for node in nodes for source in self._read_by(node) if of.get(source) is not kernel)
            reads[kernel] = list(dict.fromkeys(found))
        needed = {self._root[node] for node in (*self._results, *self._kept)}
        needed.update(source for found in reads.values() for source in found)
        order = self._in_order(members, reads, of)
        kernels = []
        for kernel in order:
            made = [n for n in members[kernel] if n in needed or (self._is_called(n) and tensors_of(n))]
            inside = self._with_inlined(members[kernel])
            kernels.append(self._made_kernel(inside, reads[kernel], self._without_tuples(made)))
        given = [node for node in self._nodes if node.op in ("placeholder", "get_attr") and tensors_of(node)]
        sizes = {self._name(node): self._size(node) for node in (*given, *owners)}
        roots = {node.name: self._name(root) for node, root in self._root.items()}
        return KernelGraph(
            tuple(kernels),
            sizes,
            tuple(dict.fromkeys(self._name(node) for node in given)),
            tuple(dict.fromkeys(roots[node.name] for node in self._results)),
            tuple(dict.fromkeys(roots[node.name] for node in self._kept)),
            roots,
        )

    def _in_order(
        self, members: Mapping[Node, list[Node]], reads: Mapping[Node, list[Node]], of: Mapping[Node, Node]
    ) -> Iterator[Node]:
        """Kernels in an order that respects their reads, otherwise in that of their first stored results."""
        position = {node: k for k, node in enumerate(self._nodes)}
        graph: nx.DiGraph[Node] = nx.DiGraph()
        graph.add_nodes_from(members)
        graph.add_edges_from(
            (of[source], kernel) for kernel, found in reads.items() for source in found if source in of
        )
        found: Iterator[Node] = nx.lexicographical_topological_sort(
            graph, key=lambda kernel: min(position[node] for node in members[kernel])
        )
        return found

    def _without_tuples(self, nodes: list[Node]) -> list[Node]:
        """Leave out an operator whose results are nodes of their own."""
        taken = {self._called(node) for node in nodes if node.target is operator.getitem}
        return [node for node in nodes if node not in taken]

    def _made_kernel(self, nodes: list[Node], reads: list[Node], writes: list[Node]) -> Kernel:
        called = [node for node in nodes if node.target is not operator.getitem]
        first = called[0] if called else nodes[0]
        return Kernel(
            operators=tuple(node.name for node in nodes),
            targets=tuple((str(node.target), _moved(node)) for node in called),
            reads=tuple(dict.fromkeys(self._name(node) for node in reads if tensors_of(node))),
            writes=tuple(self._name(node) for node in writes),
            flops=sum(map(_flops, called)),
            dtype=_dtype([*(t for n in first.all_input_nodes for t in tensors_of(n)), *tensors_of(first)]),
            is_random=any(_is_random(node) for node in called),
            is_generated=self._is_generated(first),
            overwrites=self._overwrites(nodes, reads, writes) if self._is_generated(first) else (),
        )

    def _overwrites(self, nodes: list[Node], reads: list[Node], writes: list[Node]) -> tuple[tuple[str, str], ...]:
        pairs = overwritten(writes, reads, set(nodes), _is_reduction)
        return tuple((self._name(result), self._name(argument)) for result, argument in pairs)

    def _size(self, node: Node) -> int:
        return bytes_of(tensors_of(node))

    def _name(self, root: Node) -> str:
        return self._names.get(root.name, root.name)


def _flops(node: Node) -> int:
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    args, kwargs = arguments_of(node)
    return operator_flops(node.target, args, kwargs, node.meta.get("val"))


def _moved(node: Node) -> Tensors:
    """Bytes of the tensors that an operator reads and returns."""
    read = bytes_of(tensor for source in node.all_input_nodes for tensor in tensors_of(source))
    return Tensors(read, bytes_of(tensors_of(node)))


def _is_reduction(node: Node) -> bool:
    name = str(node.target).split(".")[1] if "." in str(node.target) else ""
    return operator_class(str(node.target)) is OperatorClass.REDUCTION or name in _REDUCTIONS


def _is_view(node: Node) -> bool:
    """Whether a result has the memory of the first argument; ``prims`` do not declare it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return is_view(node.target) or node.target is torch.ops.prims.broadcast_in_dim.default


def _is_random(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name
    return name.endswith(("inductor_seed", "inductor_seeds")) or draws_random_numbers(node.target, *arguments_of(node))


def _dtype(tensors: Iterable[Tensor]) -> str:
    floating = (dtype_name(tensor) for tensor in tensors if tensor.dtype.is_floating_point)
    return next(floating, "float32")


def _bytes(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def _flat(arguments: Any) -> Iterator[Any]:
    if isinstance(arguments, (list, tuple)):
        for each in arguments:
            yield from _flat(each)
    else:
        yield arguments
