"""Our own small graph of one training step: operators, values, storages.

Built once by :mod:`planner.strategies.traced_step`; everything after it (rules, costs, models, schedule, replay,
executor) reads this graph and never torch's own. It holds plain Python data only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


HALF = ("bfloat16", "float16")
"""Floating-point dtypes of 16 bits."""

_ADD, _CAST = "aten.add.Tensor", "aten._to_copy.default"


class Phase(StrEnum):
    """Phase of the step in which an operator runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


class ValueRole(StrEnum):
    """Role of a value in the training step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"
    ACTIVATION = "activation"


class OutputRole(StrEnum):
    """Role of an output of the graph."""

    LOSS = "loss"
    GRADIENT = "gradient"
    BUFFER_UPDATE = "buffer_update"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, stride (elements) and dtype (torch's name without ``torch.``) of a global tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of a dense tensor of this shape."""
        return self.numel * self.item_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether elements lie in memory in the order of the dimensions, one behind the other."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def memory_order(self) -> tuple[int, ...]:
        """Dimensions from the outermost to the innermost in memory; 0, 1, ... for a contiguous tensor."""
        plain = tuple(range(len(self.shape)))
        expected = 1
        for dim in reversed(plain):
            if self.shape[dim] != 1:
                if self.stride[dim] != expected:
                    return tuple(sorted(plain, key=lambda dim: -self.stride[dim]))
                expected *= self.shape[dim]
        return plain


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the graph.

    Parameters
    ----------
    index
        Position in :attr:`OperatorGraph.values`.
    name
        Stable name: the parameter's, buffer's or input's own name, or ``identity#output``.
    spec
        Global shape, stride, dtype.
    role
        Its role in the step.
    producer, output_index
        Operator that produces it and which of its outputs it is; None and 0 for inputs of the graph.
    trainable
        For a parameter: whether it gets a gradient and optimizer state.
    aliases
        For a parameter that is tied: the other names of the same tensor.
    """

    index: int
    name: str
    spec: TensorSpec
    role: ValueRole
    producer: int | None = None
    output_index: int = 0
    trainable: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Operator:
    """One ATen call of the joint graph (``getitem`` is folded away).

    Parameters
    ----------
    index
        Position in :attr:`OperatorGraph.operators`, which is the order of execution.
    identity
        Stable identity ``module_path/phase/target/occurrence``, unique in the graph.
    node_name
        Name of the fx node it came from.
    target
        For example ``aten.addmm.default``.
    module_path
        Path of the module whose forward made it (empty for the root).
    phase
        Forward or backward.
    inputs
        Value indices of the tensor arguments, in the order in which pytree flattens
        ``(args, kwargs)``; a value may occur twice.
    outputs
        Value index per returned tensor, None where the operator returns no tensor there.
    is_view
        Whether its outputs alias its first input's storage and cost nothing.
    is_random
        Whether it draws random numbers.
    flops
        FLOP of the global operator.
    forward
        For a backward operator, the index of its forward operator where known.
    source
        ``file:line`` in the user's or library's code where known, else empty.
    softmax_dim
        Dimension over which a softmax or its gradient sums; None for other operators.
    """

    index: int
    identity: str
    node_name: str
    target: str
    module_path: str
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    is_view: bool
    is_random: bool
    flops: int
    forward: int | None = None
    source: str = ""
    softmax_dim: int | None = None


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """An output of the step: the loss, a parameter's gradient or a buffer's new value.

    ``of`` is the value index of the parameter or buffer; None for the loss.
    """

    role: OutputRole
    value: int
    of: int | None = None


@dataclass(frozen=True)
class OperatorGraph:
    """The joint forward and backward graph of one training step.

    ``inputs`` are the value indices of the placeholders in the order of the fx graph. Operators are in
    order of execution: every forward operator precedes every backward operator.
    """

    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[GraphOutput, ...]
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        return f"<graph of {len(self.operators)} operators on {len(self.values)} values>"

    @property
    def parameters(self) -> tuple[Value, ...]:
        """Parameters in the order of the inputs; a tied parameter occurs once."""
        return tuple(self.values[i] for i in self.inputs if self.values[i].role is ValueRole.PARAMETER)

    @property
    def random_targets(self) -> tuple[str, ...]:
        """Targets of the operators that draw random numbers, each once."""
        return tuple(sorted({operator.target for operator in self.operators if operator.is_random}))

    @cached_property
    def gradient_specs(self) -> dict[int, TensorSpec]:
        """The gradient of each trained parameter by the parameter's value index."""
        return {
            output.of: self.values[output.value].spec
            for output in self.outputs
            if output.role is OutputRole.GRADIENT and output.of is not None
        }

    @cached_property
    def gradient_dtypes(self) -> dict[int, str]:
        """Dtype of the gradient of each trained parameter by its value index."""
        return {parameter: spec.dtype for parameter, spec in self.gradient_specs.items()}

    @cached_property
    def gradient_casts(self) -> frozenset[int]:
        """Operators that cast the 16-bit gradient of a parameter to a wider dtype.

        Behind them are only views and sums of the gradients of a tied parameter. Gradients are summed over devices
        behind the cast, never ahead of it.
        """
        ahead = [output.value for output in self.outputs if output.role is OutputRole.GRADIENT]
        found: set[int] = set()
        while ahead:
            producer = self.values[ahead.pop()].producer
            if producer is None:
                continue
            operator = self.operators[producer]
            if operator.target == _CAST:
                source, (made,) = self.values[operator.inputs[0]].spec, operator.outputs
                if source.dtype in HALF and made is not None and self.values[made].spec.item_bytes > source.item_bytes:
                    found.add(producer)
            elif operator.is_view or operator.target == _ADD:
                ahead += operator.inputs
        return frozenset(found)

    def to_networkx(self, depth: int | None = None) -> nx.MultiDiGraph[str]:
        """Operators as nodes and values as edges, with attributes for plots and for export to GraphML or JSON.

        It is a multigraph because one operator may read several values of another. A value without a producer
        (parameter, buffer, input) is no edge.

        Parameters
        ----------
        depth
            Operators of one phase whose module paths begin with the same ``depth`` names become one node. With None
            every operator is a node of its own.

        Returns
        -------
        networkx.MultiDiGraph
            Nodes are in the order of execution, and named by :attr:`Operator.identity` or, folded,
            ``module_path/phase``. An edge leads from the producer of a value to a reader, and its key is the name of
            the value. So a value that a node reads twice is one edge, and one that a folded node reads itself is none.
            All attributes are plain integers, strings and truth values:

            =========================  =======================================================================
            node, folded or not        ``module_path``; ``phase``; ``index`` (of the first operator);
                                       ``operators`` (count); ``flops`` (FLOP); ``bytes`` (of the outputs; a
                                       view has 0, because it owns no storage)
            node of a single operator  also ``target``, ``source`` and ``is_view``, as in :class:`Operator`
            edge                       ``value`` (name); ``shape`` (such as ``(8, 64)``); ``dtype``; ``bytes``
            =========================  =======================================================================

        Raises
        ------
        ValueError
            The depth is negative.

        Notes
        -----
        Without ``depth`` the graph is acyclic. Folded it may have cycles: a residual connection leaves the module of a
        block, and the sum comes back to it.
        """
        import networkx as nx  # here, because ranks read this module and export nothing

        if depth is not None and depth < 0:
            raise ValueError(f"depth is {depth}: give 0 or more names of a module path, or None to fold nothing")
        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        names: list[str] = []
        for operator in self.operators:
            path = module_prefix(operator.module_path, depth)
            names.append(operator.identity if depth is None else f"{path}/{operator.phase}")
            if names[-1] not in graph:
                figures = {"index": operator.index, "operators": 0, "flops": 0, "bytes": 0}
                graph.add_node(names[-1], module_path=path, phase=operator.phase.value, **figures)
            node: dict[str, Any] = graph.nodes[names[-1]]
            node["operators"] += 1
            node["flops"] += operator.flops
            if not operator.is_view:
                node["bytes"] += sum(self.values[value].spec.nbytes for value in operator.outputs if value is not None)
            if depth is None:
                node.update(target=operator.target, source=operator.source, is_view=operator.is_view)
            for value in (self.values[index] for index in operator.inputs):
                if value.producer is not None and names[value.producer] != names[-1]:
                    spec = value.spec
                    label = {"value": value.name, "shape": str(spec.shape), "dtype": spec.dtype, "bytes": spec.nbytes}
                    graph.add_edge(names[value.producer], names[-1], key=value.name, **label)
        return graph


def module_prefix(path: str, depth: int | None) -> str:
    """First ``depth`` names of a module path, all of them if None; ``(root)`` where that is no name."""
    return ".".join(path.split(".")[:depth]) or "(root)"
