"""Galvatron-BMW's decision trees: strategies by which a group of devices shares one layer (section III-B).

A strategy is a list of levels, the outermost first, each a dimension (data, sharded data or tensor parallelism) with
a degree, and whether the layer is checkpointed. No dimension comes twice, and the product of the degrees is the size of
the group: pipeline parallelism has divided the devices before (Takeaway 1). As the outermost level spans the slowest
links, the order matters. The paper has powers of two; here any number of devices is divided in every way.

Takeaway 3 drops every list with both data and sharded data parallelism. It holds for one bandwidth and for memory.
With slow links between nodes, sharding inside a node and replicating across wins; and after sharding, the replicated
gradients are smaller than its proof counts them. So both sets of trees are here. On eight devices there are 68 and 44
strategies over all pipeline degrees, and half of these without checkpointing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, combinations, permutations
from operator import mul

__all__ = ["Dimension", "LayerStrategy", "Layout", "Level", "decision_trees", "pipeline_degrees"]


class Dimension(StrEnum):
    """A way of sharing a layer among devices."""

    DATA = "dp"
    SHARDED = "sdp"
    TENSOR = "tp"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a decision tree.

    Parameters
    ----------
    dimension, degree
        How the level divides its devices, and among how many.
    """

    dimension: Dimension
    degree: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Assignment of the samples of a micro-batch to the devices of a group.

    Parameters
    ----------
    parts
        Into how many equal parts the samples are divided.
    part_of_device
        The part that each device has; devices that share a layer by tensors have the same one.
    """

    parts: int
    part_of_device: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerStrategy:
    """Strategy by which a group of devices computes one layer.

    Parameters
    ----------
    levels
        The outermost first; none for a single device.
    checkpoint
        Whether forward keeps the layer's input alone, and backward computes the rest again.
    """

    levels: tuple[Level, ...]
    checkpoint: bool

    def __str__(self) -> str:
        words = [f"{level.dimension}{level.degree}" for level in self.levels] or ["one"]
        return "-".join([*words, "ckpt"] if self.checkpoint else words)

    def degree(self, dimension: Dimension) -> int:
        """Return the degree of a dimension, 1 where it is not used."""
        return next((level.degree for level in self.levels if level.dimension is dimension), 1)

    def stride(self, dimension: Dimension) -> int:
        """Return how far apart neighbours along a dimension are: the product of all degrees further in."""
        inner = 1
        for level in reversed(self.levels):
            if level.dimension is dimension:
                break
            inner *= level.degree
        return inner

    @property
    def devices(self) -> int:
        """Size of the group."""
        return math.prod(level.degree for level in self.levels)

    @property
    def sample_parts(self) -> int:
        """Into how many parts the samples are divided: the degrees of both kinds of data parallelism."""
        return self.degree(Dimension.DATA) * self.degree(Dimension.SHARDED)

    def layout(self) -> Layout:
        """Return the layout of the samples; device numbers count the innermost level first."""
        parts = []
        for device in range(self.devices):
            part, rest = 0, self.devices
            for level in self.levels:
                rest //= level.degree
                if level.dimension is not Dimension.TENSOR:
                    part = part * level.degree + device // rest % level.degree
            parts.append(part)
        return Layout(self.sample_parts, tuple(parts))


def decision_trees(
    devices: int,
    dimensions: Sequence[Dimension] = tuple(Dimension),
    *,
    data_with_sharded: bool = False,
    checkpoint: bool = True,
    any_order: bool = True,
) -> tuple[LayerStrategy, ...]:
    """List the strategies of a layer on a group of devices.

    Parameters
    ----------
    devices
        Size of the group.
    dimensions
        Which dimensions may be used: the paper's DP+TP is data and tensor, its DP+PP data alone.
    data_with_sharded
        Whether to keep what Takeaway 3 drops.
    checkpoint
        Whether every list comes with checkpointing, too.
    any_order
        Whether a dimension may be around any other; if not, the levels of all lists are in the order of `dimensions`,
        and axes of one mesh, whose sizes are prime and ascend from the innermost outwards.

    Raises
    ------
    ValueError
        If there is no device.
    """
    _check_devices(devices)
    orders = permutations if any_order else combinations
    trees: list[tuple[Level, ...]] = []
    for count in range(len(dimensions) + 1):
        for order in orders(dimensions, count):
            if not data_with_sharded and {Dimension.DATA, Dimension.SHARDED} <= set(order):
                continue
            trees.extend(
                tuple(map(Level, order, degrees))
                for degrees in _factorisations(devices, count)
                if any_order or _is_on_mesh(devices, degrees)
            )
    kinds = (False, True) if checkpoint else (False,)
    return tuple(LayerStrategy(levels, checkpointed) for checkpointed in kinds for levels in trees)


def pipeline_degrees(devices: int) -> tuple[int, ...]:
    """Return the numbers of stages that divide a cluster, ascending, up to the number of devices.

    Raises
    ------
    ValueError
        If there is no device.
    """
    _check_devices(devices)
    return tuple(degree for degree in range(1, devices + 1) if devices % degree == 0)


def _check_devices(devices: int) -> None:
    if devices < 1:
        raise ValueError(f"a group of {devices} devices: use at least one")


def _factorisations(total: int, parts: int) -> list[tuple[int, ...]]:
    """Ordered ways of writing a number as a product of numbers above 1."""
    if parts == 0:
        return [()] if total == 1 else []
    firsts = [first for first in range(2, total + 1) if total % first == 0]
    return [(first, *rest) for first in firsts for rest in _factorisations(total // first, parts - 1)]


def _is_on_mesh(devices: int, degrees: Sequence[int]) -> bool:
    """Whether levels, the outermost first, are runs of neighbouring axes of the mesh of ascending primes."""
    blocks = [1]
    while blocks[-1] < devices:
        rest = devices // blocks[-1]
        blocks.append(blocks[-1] * next(prime for prime in range(2, rest + 1) if rest % prime == 0))
    return all(block in blocks for block in accumulate(reversed(degrees), mul))
