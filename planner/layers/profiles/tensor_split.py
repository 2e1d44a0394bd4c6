"""The part of a traced transformer's module that tensor parallelism divides, found by its structure.

Megatron-LM's scheme (Shoeybi et al. 2019, section 3): an attention or feed-forward module begins with products whose
weights are cut by columns and ends with one whose weight is cut by rows. Everything that follows from the first ones is
divided, by heads in attention and by the inner width in a feed-forward module; the result of the last one is summed
over the group, so it is whole on every device again and so is its bias.

A module that does not have this structure is divided nowhere: experts, convolutions, embeddings, heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import gcd

from planner.graph.operator_classes import operator_name
from planner.graph.operator_graph import Operator, OperatorGraph, ValueRole
from planner.layers.profiles.regions import ATTENTION, CROSS_ATTENTION, FEED_FORWARD, Region

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear"})
_SOFTMAX = frozenset({"_softmax", "_safe_softmax"})


@dataclass(frozen=True, slots=True)
class DividedModule:
    """The part of a region that tensor parallelism divides.

    Parameters
    ----------
    divisor
        Degrees that divide it are possible; 0 where nothing is divided.
    operators
        Forward operators whose arithmetic is divided.
    entries
        Operators among these that read whole hidden states: the gradients that they hand back are whole, too.
    values
        Values (owners of storages) that are divided.
    parameters
        Parameters (value indices) that are divided.
    reduced
        Values that the group sums up at the end; empty where nothing is divided.
    """

    divisor: int = 0
    operators: frozenset[int] = frozenset()
    entries: frozenset[int] = frozenset()
    values: frozenset[int] = frozenset()
    parameters: frozenset[int] = frozenset()
    reduced: tuple[int, ...] = ()


def divided_module(graph: OperatorGraph, region: Region, bases: tuple[int, ...]) -> DividedModule:
    """Find the part of a region that tensor parallelism divides.

    Parameters
    ----------
    graph, region
        The traced step, and a region with a role.
    bases
        Per value of the graph, the value that owns its storage.
    """
    computing = [graph.operators[index] for index in region.operators if not graph.operators[index].is_view]
    products = [operator for operator in computing if _weights(graph, operator, bases)]
    if region.role not in (ATTENTION, CROSS_ATTENTION, FEED_FORWARD) or len(products) < 2:
        return DividedModule()
    last = products[-1]
    if any(len(graph.values[weight].spec.shape) != 2 for op in products for weight in _weights(graph, op, bases)):
        return DividedModule()
    divisor = _widths(graph, products[:-1]) if region.role == FEED_FORWARD else _heads(graph, computing)
    if not divisor:
        return DividedModule()
    columns = frozenset(operator.index for operator in products[:-1])
    divided: set[int] = set()
    operators: set[int] = {last.index}
    parameters = set(_weights(graph, last, bases))
    for operator in computing:
        if operator.index >= last.index:
            break
        read = [bases[value] for value in operator.inputs]
        follows = bool(divided.intersection(read))
        if operator.index in columns and follows:
            return DividedModule()  # a product of products: experts, or more than two layers
        looked_up = operator.index > products[0].index and _tables(graph, read)
        if operator.index in columns or looked_up or follows:
            operators.add(operator.index)
            divided.update(bases[value] for value in operator.outputs if value is not None)
            parameters.update(base for base in read if graph.values[base].role is ValueRole.PARAMETER)
    reduced = tuple(bases[value] for value in last.outputs if value is not None)
    return DividedModule(divisor, frozenset(operators), columns, frozenset(divided), frozenset(parameters), reduced)


def _weights(graph: OperatorGraph, operator: Operator, bases: tuple[int, ...]) -> set[int]:
    """Parameters that a product multiplies with; empty for other operators."""
    if operator_name(operator.target) not in _PRODUCTS:
        return set()
    return _tables(graph, [bases[value] for value in operator.inputs])


def _tables(graph: OperatorGraph, read: list[int]) -> set[int]:
    """Parameters of two dimensions or more among values."""
    values = graph.values
    return {base for base in read if values[base].role is ValueRole.PARAMETER and len(values[base].spec.shape) > 1}


def _widths(graph: OperatorGraph, products: list[Operator]) -> int:
    """Greatest common divisor of the widths that products make."""
    made = [graph.values[value].spec.shape[-1] for op in products for value in op.outputs if value is not None]
    return reduce(gcd, made)


def _heads(graph: OperatorGraph, computing: list[Operator]) -> int:
    """Heads of an attention module, from its softmax or fused kernel; 0 where it has neither."""
    found = 0
    for operator in computing:
        name = operator_name(operator.target)
        fused = "scaled_dot_product" in name or name.startswith(("_flash_attention", "_efficient_attention"))
        if name in _SOFTMAX or fused:
            shapes = [graph.values[value].spec.shape for value in operator.inputs[: 2 if fused else 1]]
            found = reduce(gcd, (shape[-3] for shape in shapes if len(shape) == 4), found)
    return found
