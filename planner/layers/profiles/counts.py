"""Memory and time of the layers of a traced step, at its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import OperatorGraph, OutputRole, Phase, ValueRole
from planner.graph.placement import REPLICATE
from planner.graph.view_chains import view_chains
from planner.layers.profiles.regions import Region, joined_regions, module_regions, operator_regions
from planner.layers.profiles.storages import RegionBytes, Size, StorageTimes, bytes_beyond, region_bytes
from planner.layers.profiles.tensor_split import DividedModule, divided_module
from planner.machine.cluster import ClusterSpec
from planner.machine.costs import CostModel
from planner.strategies.sharding_rules import Strategy


@dataclass(frozen=True, slots=True)
class LayerCount:
    """One layer of a traced step, at its batch.

    Parameters
    ----------
    name
        Of the layer.
    parameter_bytes, borrowed_parameter_bytes, divided_parameter_bytes
        As in :class:`formulations.layers.layer.LayerProfile`, and the part of the first that tensor parallelism
        divides.
    parameters
        Value indices of the parameters that it counts.
    whole, undivided
        Bytes of its storages; and with those that tensor parallelism divides left out.
    beyond, undivided_beyond
        :func:`planner.layers.profiles.storages.bytes_beyond` of its operators, per phase; both counts of storages.
    late_beyond
        `beyond` in backward from the first operator on that reads a parameter or makes the gradient of one.
    largest_parameter_bytes
        Of the parameters that it reads the largest one's.
    seconds, divided_seconds
        Of forward and backward, and the parts that tensor parallelism divides.
    divisor, reduced_bytes
        As in :class:`formulations.layers.layer.SplitPart`, for the whole batch.
    """

    name: str
    parameter_bytes: int
    borrowed_parameter_bytes: int
    divided_parameter_bytes: int
    parameters: tuple[int, ...]
    whole: RegionBytes
    undivided: RegionBytes
    beyond: dict[Phase, NDArray[np.int64]]
    undivided_beyond: dict[Phase, NDArray[np.int64]]
    late_beyond: NDArray[np.int64]
    largest_parameter_bytes: int
    seconds: tuple[float, float]
    divided_seconds: tuple[float, float]
    divisor: int
    reduced_bytes: int


def count_layers(graph: OperatorGraph, cluster: ClusterSpec, apart: bool) -> list[LayerCount]:
    """Figures of every layer of a traced step, in the order in which they run.

    Parameters
    ----------
    graph
        The traced step.
    cluster
        Whose device computes.
    apart
        Whether attention and feed-forward modules are layers of their own.
    """
    bases = tuple(chain.base for chain in view_chains(graph))
    modules = module_regions(graph)
    groups = tuple((module,) for module in modules) if apart else joined_regions(modules)
    layers = [_joined(group) for group in groups]
    divided = [divided_module(graph, module, bases) for module in modules]
    of_operator = operator_regions(graph, layers)
    times = StorageTimes(graph, bases, of_operator)
    shared, small = _divided(graph, divided, bases)
    sizes: tuple[Size, Size] = (
        lambda value: graph.values[value].spec.nbytes,
        lambda value: 0 if value in small else graph.values[value].spec.nbytes,
    )
    whole, rest = (region_bytes(times, len(layers), size) for size in sizes)
    indices = _by_layer(graph, of_operator)
    figures, rest_figures = (
        bytes_beyond(times, regions, size) for regions, size in zip((whole, rest), sizes, strict=True)
    )
    early = _before_parameters(graph, bases, indices)
    seconds = _seconds(graph, cluster, of_operator, shared)
    owned, borrowed = _parameters(graph, layers, bases)
    cut = frozenset[int]().union(*(part.parameters for part in divided))
    result, first = [], 0
    for position, (layer, group) in enumerate(zip(layers, groups, strict=True)):
        parts = divided[first : first + len(group)]
        first += len(group)
        parameters = {value: graph.values[value].spec.nbytes for value in owned[position]}
        result.append(
            LayerCount(
                layer.name,
                sum(parameters.values()),
                sum(graph.values[value].spec.nbytes for value in borrowed[position]),
                sum(nbytes for value, nbytes in parameters.items() if value in cut),
                tuple(parameters),
                whole[position],
                rest[position],
                {phase: figures[at] for phase, at in indices[position].items()},
                {phase: rest_figures[at] for phase, at in indices[position].items()},
                figures[indices[position][Phase.BACKWARD][early[position] :]],
                max((graph.values[value].spec.nbytes for value in (*owned[position], *borrowed[position])), default=0),
                (seconds[Phase.FORWARD, False][position], seconds[Phase.BACKWARD, False][position]),
                (seconds[Phase.FORWARD, True][position], seconds[Phase.BACKWARD, True][position]),
                reduce(gcd, (part.divisor for part in parts), 0),
                sum(graph.values[value].spec.nbytes for part in parts for value in part.reduced),
            )
        )
    return result


def _by_layer(graph: OperatorGraph, layers: Sequence[int]) -> list[dict[Phase, list[int]]]:
    """Operators of each layer, by phase, views left out."""
    indices = [{phase: list[int]() for phase in Phase} for _ in range(max(layers) + 1)]
    for operator in graph.operators:
        if not operator.is_view:
            indices[layers[operator.index]][operator.phase].append(operator.index)
    return indices


def _before_parameters(
    graph: OperatorGraph, bases: Sequence[int], indices: Sequence[Mapping[Phase, Sequence[int]]]
) -> list[int]:
    """How many operators of each layer's backward come before the first that needs a parameter or its gradient."""
    needed = {value.index for value in graph.parameters}
    needed |= {bases[output.value] for output in graph.outputs if output.role is OutputRole.GRADIENT}
    counts = []
    for layer in indices:
        operators = [graph.operators[index] for index in layer[Phase.BACKWARD]]
        uses = [
            not needed.isdisjoint(bases[value] for value in (*operator.inputs, *operator.outputs) if value is not None)
            for operator in operators
        ]
        counts.append(uses.index(True) if True in uses else 0)
    return counts


def _joined(group: Sequence[Region]) -> Region:
    """The modules of a block as one region."""
    first = group[0]
    if len(group) == 1:
        return first
    name = first.name.removesuffix(f".{first.role}")
    return Region(name, first.block, "", tuple(index for region in group for index in region.operators))


def _divided(graph: OperatorGraph, modules: Sequence[DividedModule], bases: Sequence[int]) -> tuple[set[int], set[int]]:
    """Operators whose arithmetic tensor parallelism divides, and owners of the storages that it divides.

    The backward of a divided operator is divided, and so are the gradients that it hands back, unless the operator
    reads whole hidden states. A sum of gradients is divided as its terms are, a copy of a view's gradient as its base.
    """
    operators = set[int]().union(*(part.operators for part in modules))
    entries = set[int]().union(*(part.entries for part in modules))
    values = set[int]().union(*(part.values for part in modules))
    operators |= {op.index for op in graph.operators if op.is_view and bases[op.inputs[0]] in values}
    for operator in graph.operators:
        if operator.phase is Phase.FORWARD or operator.is_view:
            continue
        if operator.forward is None:
            inside = bool(operator.inputs) and values.issuperset(bases[value] for value in operator.inputs)
        else:
            inside = operator.forward in operators
        if inside:
            operators.add(operator.index)
            if operator.forward not in entries:
                values.update(value for value in operator.outputs if value is not None)
    return operators, values


def _parameters(
    graph: OperatorGraph, layers: Sequence[Region], bases: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Parameters that each layer counts, and parameters that it reads but an earlier layer counts.

    A parameter that no operator reads is counted in the first layer.
    """
    owned: list[list[int]] = [[] for _ in layers]
    borrowed: list[list[int]] = [[] for _ in layers]
    owner: dict[int, int] = {}
    for position, layer in enumerate(layers):
        read = {bases[value] for index in layer.operators for value in graph.operators[index].inputs}
        for value in sorted(value for value in read if graph.values[value].role is ValueRole.PARAMETER):
            kept = owned if owner.setdefault(value, position) == position else borrowed
            kept[position].append(value)
    owned[0] += [value.index for value in graph.parameters if value.index not in owner]
    return owned, borrowed


def _seconds(
    graph: OperatorGraph, cluster: ClusterSpec, regions: Sequence[int], divided: set[int]
) -> dict[tuple[Phase, bool], list[float]]:
    """Seconds per region on one device, by phase; with True the part that tensor parallelism divides."""
    costs = CostModel(cluster, (1,))
    count = max(regions) + 1
    result = {(phase, part): [0.0] * count for phase in Phase for part in (False, True)}
    for operator, region in zip(graph.operators, regions, strict=True):
        outputs = tuple(None if value is None else (REPLICATE,) for value in operator.outputs)
        whole = Strategy(outputs, ((REPLICATE,),) * len(operator.inputs), ())
        spent = float(costs.operator_seconds(graph, operator, (whole,))[0])
        result[operator.phase, False][region] += spent
        if operator.index in divided:
            result[operator.phase, True][region] += spent
    return result
