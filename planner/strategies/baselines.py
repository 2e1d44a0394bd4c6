"""Recomputation by fixed rules: the baselines that planned recomputation is compared with.

A policy selects the forward operators whose outputs are kept for the backward pass. All other outputs are dropped
after their last forward use. An operator runs a second time if the backward pass reads its output, directly or to
recompute another. A policy depends on the operators alone: it solves nothing and reads no sizes.

- :func:`checkpoint_dots` keeps results of matrix products, convolutions and attention kernels (the policy
  ``dots_saveable`` of ``jax.checkpoint``).
- :func:`megatron_selective` drops the inside of attention (Korthikanti et al. 2022, section 5).
- :func:`full_checkpoint` keeps what enters a block and drops its inside (Chen et al. 2016; what
  ``torch.utils.checkpoint`` around every block does).

Operators that make a result of the step (the loss, a buffer's new value) are kept by every policy: to run
them again would give that result twice. Random operators may run again, they draw by counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

import networkx as nx

from planner.graph.operator_classes import ARITHMETIC, OperatorClass, operator_class, operator_name
from planner.graph.operator_graph import Operator, OperatorGraph, Phase, ValueRole
from planner.graph.view_chains import view_chains
from planner.strategies.blocks import operator_blocks

Policy = Callable[[OperatorGraph], frozenset[int]]
"""From a traced step to the indices of the forward operators that run again."""

_CASTS = frozenset({"_to_copy", "to"})


def checkpoint_dots(graph: OperatorGraph) -> frozenset[int]:
    """Keep matrix products, convolutions and attention kernels; run everything else again.

    Returns
    -------
    frozenset of int
        Forward operators that run again.
    """
    kept = {operator.index for operator in graph.operators if operator_class(operator.target) in ARITHMETIC}
    return _Dataflow(graph).run_again(kept)


def megatron_selective(graph: OperatorGraph) -> frozenset[int]:
    """Run the core of attention again, from the product of queries and keys on; keep everything else.

    The core's result is kept where its last operator does not need it itself: the output projection reads it
    in the backward pass. A fused attention kernel is the whole core, so it runs again as it is.

    Returns
    -------
    frozenset of int
        Forward operators that run again; none in a model without attention.
    """
    flow = _Dataflow(graph)
    return flow.run_again({operator.index for operator in graph.operators} - _attention_core(flow))


def full_checkpoint(graph: OperatorGraph) -> frozenset[int]:
    """Keep what enters a block, and run the inside of every block again; outside of blocks keep everything.

    Blocks are those of :mod:`planner.strategies.blocks`. What one block hands to another part of the model is kept.

    Returns
    -------
    frozenset of int
        Forward operators that run again; none in a model without numbered modules.
    """
    flow, blocks = _Dataflow(graph), operator_blocks(graph)
    outside = {operator.index for operator in graph.operators if blocks[operator.index] is None}
    handed_over = {
        producer
        for producer, reader in flow.readers.edges
        if reader != _BACKWARD and blocks[producer] != blocks[reader]
    }
    return flow.run_again(outside | handed_over)


def surviving_values(graph: OperatorGraph, recomputed: Set[int]) -> frozenset[int]:
    """Outputs of forward operators that are held until the backward pass has used them.

    Parameters
    ----------
    graph
        A traced step.
    recomputed
        Forward operators that run again.

    Returns
    -------
    frozenset of int
        Outputs of the other forward operators that backward or recomputed operators read.
    """
    flow = _Dataflow(graph)
    readers = [op for op in flow.computing if op.phase is Phase.BACKWARD or op.index in recomputed]
    return frozenset(
        base
        for operator in readers
        for base in flow.read(operator)
        if (producer := flow.forward_producer(base)) is not None and producer not in recomputed
    )


BASELINES: dict[str, Policy] = {
    "checkpoint_dots": checkpoint_dots,
    "megatron_selective": megatron_selective,
    "full_checkpoint": full_checkpoint,
}
"""Policies by name."""


_BACKWARD = -1
"""Node of the whole backward pass among forward operators."""


class _Dataflow:
    """Producers and readers of storages, views folded.

    Attributes
    ----------
    readers
        Forward operators by index, and :data:`_BACKWARD`; an edge leads from an operator to each reader of its outputs.
    """

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.bases = tuple(chain.base for chain in view_chains(graph))
        self.computing = tuple(operator for operator in graph.operators if not operator.is_view)
        self.readers: nx.DiGraph[int] = nx.DiGraph()
        self.readers.add_node(_BACKWARD)
        for operator in self.computing:
            reader = operator.index if operator.phase is Phase.FORWARD else _BACKWARD
            producers = map(self.forward_producer, self.read(operator))
            self.readers.add_node(reader)
            self.readers.add_edges_from((producer, reader) for producer in producers if producer is not None)

    def read(self, operator: Operator) -> list[int]:
        """Values that own the storages of an operator's arguments."""
        return [self.bases[value] for value in operator.inputs]

    def forward_producer(self, base: int) -> int | None:
        """Forward operator that makes a value; None for inputs of the step and values of the backward pass."""
        producer = self.graph.values[base].producer
        if producer is None or self.graph.operators[producer].phase is not Phase.FORWARD:
            return None
        return producer

    def run_again(self, kept: Iterable[int]) -> frozenset[int]:
        """Operators that must run again when only the outputs of some are kept."""
        makers_of_results = (self.forward_producer(self.bases[output.value]) for output in self.graph.outputs)
        dropped = nx.restricted_view(self.readers, {*kept, *makers_of_results}, ())
        return frozenset(nx.ancestors(dropped, _BACKWARD))

    def multiplies_activations(self, operator: Operator) -> bool:
        """Whether an operator is a matrix product of two tensors neither of which is a parameter."""
        if operator_class(operator.target) is not OperatorClass.MATMUL:
            return False
        return not any(self._is_parameter(base) for base in self.read(operator))

    def _is_parameter(self, base: int) -> bool:
        value = self.graph.values[base]
        if value.producer is None:
            return value.role is ValueRole.PARAMETER
        producer = self.graph.operators[value.producer]
        return operator_name(producer.target) in _CASTS and self._is_parameter(self.read(producer)[0])


def _attention_core(flow: _Dataflow) -> set[int]:
    """Operators of every attention core: fused kernels, and what lies between two products of activations.

    A product of queries and keys leads to the product with the values, whatever the softmax between them is
    written with; to the other products of a model a parameter is an argument.
    """
    forward = [operator for operator in flow.computing if operator.phase is Phase.FORWARD]
    classes = {operator.index: operator_class(operator.target) for operator in forward}
    fused = {index for index, kind in classes.items() if kind is OperatorClass.ATTENTION_FORWARD}
    products = {index for index, kind in classes.items() if kind is OperatorClass.MATMUL}
    mixing = {operator.index for operator in forward if flow.multiplies_activations(operator)}
    inside = nx.restricted_view(flow.readers, products - mixing, ())
    behind = mixing.union(*(nx.descendants(inside, product) for product in mixing))
    before = set[int]().union(*(nx.ancestors(inside, product) for product in mixing))
    return fused | (behind & before)
