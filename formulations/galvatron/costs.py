"""Galvatron-BMW's cost estimator (section V): time and memory of a layer under every strategy.

Of ``b`` samples of a micro-batch a device has ``b / d``, where ``d`` is the product of both data-parallel degrees.

- Compute is per sample, and backward is that of the profile (the paper: twice forward). Checkpointing adds one
  forward, with its communication.
- Tensor parallelism all-reduces in forward and in backward, sharded data parallelism gathers parameters in both;
  neither is overlapped.
- Gradients are reduced during backward: replicas all-reduce, shards reduce-scatter. Compute and traffic that overlap
  slow each other by a factor, 1.3 in the paper: ``max + 0.3 min``. Only the last micro-batch of a step does this; a
  micro-batch without synchronisation is computed without it (Eq. 8 repaired), or as printed by subtracting all traffic.
- Where neighbours divide samples differently, a device receives the samples that it lacks, and returns their gradient
  (Slice-Gather); a device that keeps a part of its samples receives nothing.
- Traffic is bytes over bandwidth, without latency; a stage hands activations to the next one for free, as in the paper.

A parameter that layers share (tied weights) is held once in every stage that has such a layer: by its owner, the first
of these layers in the model, or else by the first in the stage that borrows it.

Memory (section III-A): forward keeps input and intermediate results, or with checkpointing the input alone, for every
micro-batch in flight; backward then needs the intermediate results of its one layer, and the layer's workspace where
the profile has one. States are a multiple of the parameters: 4 for Adam in one precision, 16 bytes per parameter.
Left out, as in the paper: gathered copies of sharded parameters, and gradients that wait unsharded for the last
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import lcm

import numpy as np

from formulations.galvatron.slips import REPAIRED, Slip
from formulations.galvatron.stage import StageProblem
from formulations.galvatron.strategies import Dimension, LayerStrategy, Layout
from formulations.layers.layer import LayerChain, LayerProfile, tied_layers
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = ["CostModel", "DeviceLinks", "LayerTables", "layer_tables"]


@dataclass(frozen=True, slots=True)
class DeviceLinks:
    """Bandwidths between devices.

    Parameters
    ----------
    devices_per_node
        Devices with the fast link, numbered one after another; of a single node those that are used.
    inside, between
        Bytes per second of one device inside a node, and of one node to another.
    """

    devices_per_node: int
    inside: float
    between: float

    def bandwidth(self, stride: int, degree: int) -> float:
        """Bytes per second of a collective among `degree` devices that are `stride` apart.

        Groups lie side by side, so where their size does not divide a node's, some leave it. Those share its link:
        there are as many of them as devices between two members.
        """
        if self.devices_per_node % (stride * degree) == 0:
            return self.inside
        return min(self.inside, self.between / min(stride, self.devices_per_node))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Assumptions of the estimator beside the profiles.

    Parameters
    ----------
    links
        Bandwidths.
    states_per_parameter
        Bytes of parameters, gradients and optimizer states per byte of parameters.
    overlap_slowdown
        How much computing and communicating at once slows both.
    seconds_per_cost
        Length of the quantum.
    slips
        Of these, ``EQ8_OVERLAP`` and ``FULL_GRADIENTS`` are kept as printed where they are in it.
    """

    links: DeviceLinks
    states_per_parameter: int = 4
    overlap_slowdown: float = 1.3
    seconds_per_cost: float = 1e-7
    slips: Slip = REPAIRED


@dataclass(frozen=True, slots=True, eq=False)
class LayerTables:
    """Costs of all layers of a model on groups of one size at one micro-batch size.

    Parameters
    ----------
    strategies
        Strategies, one per column.
    kinds
        Row of each layer, shape ``(L,)``; layers that are alike share one, tied layers with tied ones alone.
    synchronised, repeated
        Quanta of the last micro-batch, and of one before it, shape ``(K, S)``.
    forward, backward, states
        Bytes ``O_f`` of one micro-batch, ``O_b`` and ``O_ms``, shape ``(K, S)``.
    borrowed
        Addition to `states` for parameters that the layer borrows from the first layer of all, shape ``(K, S)``,
        unless an earlier layer of the stage has them.
    allowed
        Whether samples, heads and widths divide evenly, shape ``(K, S)``.
    layouts
        Number of each strategy's layout, shape ``(S,)``.
    transformation
        Quanta from the layout before a layer to its own, shape ``(K, C, C)``.
    seconds_per_cost
        Length of the quantum, or None.
    """

    strategies: tuple[LayerStrategy, ...]
    kinds: IntArray
    synchronised: IntArray
    repeated: IntArray
    forward: IntArray
    backward: IntArray
    states: IntArray
    borrowed: IntArray
    allowed: BoolArray
    layouts: IntArray
    transformation: IntArray
    seconds_per_cost: float | None = None

    def with_strategy(self, layers: Sequence[int], strategy: int) -> LayerTables:
        """Return tables in which these layers, and those of their kinds, have one strategy alone."""
        allowed = self.allowed.copy()
        rows = self.kinds[list(layers)]
        allowed[rows] = False
        allowed[rows, strategy] = self.allowed[rows, strategy]
        return replace(self, allowed=allowed)

    def stage(self, first: int, end: int, in_flight: int, memory_limit: int, repeats: int = 0) -> StageProblem:
        """Return the problem of the layers ``first .. end - 1``.

        Parameters
        ----------
        first, end
            Half-open range of layers.
        in_flight
            Micro-batches whose activations are held at once.
        memory_limit
            Bytes on one device.
        repeats
            Micro-batches without synchronisation that the cost counts beside the last one.
        """
        rows = self.kinds[first:end]
        states = self.states[rows]
        if first > 0 and self.borrowed.any():
            states = states + np.diff(np.maximum.accumulate(self.borrowed[rows]), axis=0, prepend=0)
        return StageProblem(
            cost=self.synchronised[rows] + repeats * self.repeated[rows],
            repeated=self.repeated[rows],
            forward=in_flight * self.forward[rows],
            backward=self.backward[rows],
            states=states,
            allowed=self.allowed[rows],
            layouts=self.layouts,
            transformation=self.transformation[rows],
            memory_limit=memory_limit,
            repeats=1 + repeats,
            seconds_per_cost=self.seconds_per_cost,
        )


@dataclass(frozen=True, slots=True)
class _LayerCost:
    synchronised: float
    repeated: float
    forward: int
    backward: int
    states: int
    borrowed: int


@dataclass(frozen=True, slots=True)
class Restriction:
    """What a user's decisions leave to layers, by their positions.

    Parameters
    ----------
    of_layer
        Equal for layers to which the same is left, one for each layer.
    allows
        Whether a layer may have a strategy.
    """

    of_layer: tuple[Hashable, ...]
    allows: Callable[[int, LayerStrategy], bool]


def layer_tables(
    chain: LayerChain,
    strategies: Sequence[LayerStrategy],
    micro_batch: int,
    model: CostModel,
    restriction: Restriction | None = None,
) -> LayerTables:
    """Estimate all layers under all strategies.

    Parameters
    ----------
    chain
        The model.
    strategies
        At least one, all for groups of one size.
    micro_batch
        Samples of one micro-batch of the whole group; strategies whose data-parallel degree does not divide it are not
        allowed.
    model
        Bandwidths and rules.
    restriction
        What layers may have; everything if None.
    """
    rows: dict[tuple[LayerProfile, bool, Hashable], int] = {}
    tied = tied_layers(chain)
    left: tuple[Hashable, ...] = (None,) * len(chain) if restriction is None else restriction.of_layer
    kinds = [
        rows.setdefault((replace(layer, name=""), position in tied, left[position]), len(rows))
        for position, layer in enumerate(chain.layers)
    ]
    layouts: dict[Layout, int] = {}
    numbers = [layouts.setdefault(_layout(strategy), len(layouts)) for strategy in strategies]
    shape = (len(rows), len(strategies))
    tables = {name: np.zeros(shape, dtype=np.int64) for name in _LayerCost.__slots__}
    allowed = np.zeros(shape, dtype=np.bool_)
    transformation = np.zeros((len(rows), len(layouts), len(layouts)), dtype=np.int64)
    for (layer, *_), row in rows.items():
        parts: dict[int, LayerProfile] = {}
        for column, strategy in enumerate(strategies):
            degree = strategy.degree(Dimension.TENSOR)
            if micro_batch % strategy.sample_parts or not layer.allows(degree):
                continue
            if restriction is not None and not restriction.allows(kinds.index(row), strategy):
                continue
            allowed[row, column] = True
            if degree not in parts:
                parts[degree] = layer.on_one_of(degree)
            cost = _layer_cost(parts[degree], strategy, micro_batch // strategy.sample_parts, model)
            for name, table in tables.items():
                value = getattr(cost, name)
                table[row, column] = value if isinstance(value, int) else round(value / model.seconds_per_cost)
        handed_over = layer.input_bytes * micro_batch
        for before, i in layouts.items():
            for after, j in layouts.items():
                seconds = _handing_over_seconds(before, after, handed_over, model.links)
                transformation[row, i, j] = round(seconds / model.seconds_per_cost)
    return LayerTables(
        strategies=tuple(strategies),
        kinds=np.array(kinds, dtype=np.int64),
        allowed=allowed,
        layouts=np.array(numbers, dtype=np.int64),
        transformation=transformation,
        seconds_per_cost=model.seconds_per_cost,
        **tables,
    )


_layout = cache(LayerStrategy.layout)


def _layer_cost(part: LayerProfile, strategy: LayerStrategy, samples: int, model: CostModel) -> _LayerCost:
    """Seconds and bytes of one device of a group, for its part of a layer and of the samples."""
    reduce = _collective(strategy, Dimension.TENSOR, samples * part.split.reduced_bytes, 2, model.links)
    gather = _collective(strategy, Dimension.SHARDED, part.parameter_bytes, 1, model.links)
    forward = samples * part.forward_seconds + part.forward_fixed_seconds + reduce + gather
    compute = samples * part.backward_seconds + part.backward_fixed_seconds
    gradients = _gradient_seconds(strategy, part.parameter_bytes, model)
    exposed = forward + reduce + gather + (forward if strategy.checkpoint else 0.0)
    hidden = min(compute, gradients)
    synchronised = exposed + max(compute, gradients) + (model.overlap_slowdown - 1) * hidden
    repeated = synchronised - gradients if Slip.EQ8_OVERLAP in model.slips else exposed + compute
    saved = samples * part.saved_bytes + part.fixed_saved_bytes
    boundary = samples * part.input_bytes
    workspace = samples * part.backward_workspace_bytes + part.backward_fixed_workspace_bytes
    factor, shards = model.states_per_parameter, strategy.degree(Dimension.SHARDED)
    return _LayerCost(
        synchronised,
        repeated,
        boundary if strategy.checkpoint else boundary - samples * part.unread_input_bytes + saved,
        workspace + (saved if strategy.checkpoint else 0),
        -(-factor * part.parameter_bytes // shards),
        -(-factor * part.borrowed_parameter_bytes // shards),
    )


def _gradient_seconds(strategy: LayerStrategy, parameter_bytes: int, model: CostModel) -> float:
    """Reduce-scatter among shards, then all-reduce of a shard among replicas, or as printed of whole gradients."""
    shards = 1 if Slip.FULL_GRADIENTS in model.slips else strategy.degree(Dimension.SHARDED)
    scatter = _collective(strategy, Dimension.SHARDED, parameter_bytes, 1, model.links)
    return scatter + _collective(strategy, Dimension.DATA, parameter_bytes / shards, 2, model.links)


def _collective(strategy: LayerStrategy, dimension: Dimension, size: float, passes: int, links: DeviceLinks) -> float:
    """Seconds of a ring along one level: one pass gathers or scatters `size` bytes, two all-reduce them."""
    degree = strategy.degree(dimension)
    if degree == 1:
        return 0.0
    return passes * size * (degree - 1) / degree / links.bandwidth(strategy.stride(dimension), degree)


def _handing_over_seconds(before: Layout, after: Layout, size: int, links: DeviceLinks) -> float:
    """Seconds to send every device its part of `size` bytes, and the gradient back."""
    shares = [_received(*pair, links.devices_per_node) for pair in ((before, after), (after, before))]
    return size * sum(inside / links.inside + outside / links.between for inside, outside in shares)


@cache
def _received(before: Layout, after: Layout, devices_per_node: int) -> tuple[float, float]:
    """Largest share of all samples that a device receives from its own node, and a node from others.

    A device receives from its own node first; samples that no device there has come over the link between nodes, which
    its devices share. The group is assumed to begin at the start of a node.
    """
    devices = len(before.part_of_device)
    finest = lcm(before.parts, after.parts)
    inside, outside = 0, 0
    for start in range(0, devices, devices_per_node):
        node = range(start, min(start + devices_per_node, devices))
        here = _cells(node, before, finest)
        missing = [_cells([device], after, finest) - _cells([device], before, finest) for device in node]
        inside = max(inside, *(len(cells & here) for cells in missing))
        outside = max(outside, len(set().union(*missing) - here))
    return inside / finest, outside / finest


def _cells(devices: Sequence[int], layout: Layout, finest: int) -> set[int]:
    """Parts that devices have, in a division into `finest` parts."""
    each = finest // layout.parts
    return {layout.part_of_device[device] * each + k for device in devices for k in range(each)}
