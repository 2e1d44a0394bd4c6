"""CAPTURE's problem: cut layers into pipeline stages, place them on GPUs, and keep the fullest GPU as empty as can be.

A stage holds consecutive layers and runs them on some GPUs of one node, by data or by tensor parallelism; degrees are
powers of two. Stages fill the nodes in order, and the degrees on a node add up to its GPUs: none is left unused
(section III-C). The paper minimises the largest memory over all GPUs. So a stage is one of ``C`` configurations of one
of ``L (L + 1) / 2`` groups of consecutive layers, and a node of ``k = 2^d`` GPUs allows ``2 d + 1`` configurations (the
paper says ``2 d - 1``): both kinds at ``d`` degrees, and no parallelism at all.

Under 1F1B what a stage holds depends on how many stages are behind it; the paper leaves that out. Here the memory of a
configuration is a table by the number of stages behind, which has one row where that makes no difference.

Whoever decides works on the table alone: it may hold what a predictor says (the paper) or what a stage really holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from formulations.galvatron.strategies import Dimension, LayerStrategy, Level
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = [
    "CapturePlan",
    "PartitionProblem",
    "PlannedStage",
    "TraceError",
    "fewest_stages",
    "nodes_of",
    "powers_of_two",
    "stage_configurations",
    "stage_counts",
]


class TraceError(ValueError):
    """Layers, GPUs or a limit for which there is no plan; the message names the least that is possible, and why."""


class PlannedStage(NamedTuple):
    """A stage: the layers from the end of the stage before up to ``end - 1``, and the number of its configuration."""

    end: int
    configuration: int


CapturePlan = tuple[PlannedStage, ...]
"""Stages in order; plans compare in the order in which the paper's enumeration meets them."""


@dataclass(frozen=True, eq=False)
class PartitionProblem:
    """What every stage would hold, and the GPUs to be filled.

    Parameters
    ----------
    nodes
        GPUs of every node, in order.
    configurations
        Ways of running a stage, one GPU first.
    peaks
        Bytes on one GPU of a stage of the layers ``first .. end - 1``, shape ``(S, C, L, L + 1)``; the first axis is
        the number of stages behind it, the last row for all that have more. Meaningless where `allowed` is false.
    allowed
        Whether the layers can be run so, shape ``(C, L, L + 1)``; false where ``end <= first``.

    Raises
    ------
    TraceError
        There is no plan at all: the GPUs cannot be filled with so few layers.
    """

    nodes: tuple[int, ...]
    configurations: tuple[LayerStrategy, ...]
    peaks: IntArray
    allowed: BoolArray

    def __post_init__(self) -> None:
        if not self.nodes or min(self.nodes) < 1:
            raise TraceError(f"GPUs of nodes {self.nodes}: give at least one node, and every node a GPU")
        needed = sum(fewest_stages(node, self.degrees.tolist()) for node in self.nodes)
        if self.layers < needed:
            raise TraceError(
                f"{self.layers} layers for {self.gpus} GPUs on nodes of {_listed(self.nodes)}: no GPU may stay unused "
                f"and a stage has at most {max(self.degrees)} GPUs of one node, so there are at least {needed} stages, "
                "each with a layer; use fewer GPUs or more layers"
            )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.peaks.shape[2])

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return sum(self.nodes)

    @cached_property
    def degrees(self) -> IntArray:
        """GPUs of every configuration, shape ``(C,)``."""
        return np.array([configuration.devices for configuration in self.configurations], dtype=np.int64)

    @cached_property
    def room(self) -> IntArray:
        """GPUs from each one to the end of its node, shape ``(G,)``."""
        return np.array([left for node in self.nodes for left in range(node, 0, -1)], dtype=np.int64)

    def stages(self, plan: CapturePlan) -> Iterator[tuple[int, PlannedStage]]:
        """First layer and stage, in order."""
        first = 0
        for stage in plan:
            yield first, stage
            first = stage.end

    def stage_peaks(self, plan: CapturePlan) -> tuple[int, ...]:
        """Bytes on one GPU of every stage."""
        rows = len(self.peaks)
        return tuple(
            int(self.peaks[min(len(plan) - 1 - position, rows - 1), stage.configuration, first, stage.end])
            for position, (first, stage) in enumerate(self.stages(plan))
        )

    def gpu_peaks(self, plan: CapturePlan) -> tuple[int, ...]:
        """Bytes of every GPU, in the order in which stages fill them."""
        peaks = zip(self.stage_peaks(plan), plan, strict=True)
        return tuple(peak for peak, stage in peaks for _ in range(int(self.degrees[stage.configuration])))

    def peak(self, plan: CapturePlan) -> int:
        """Bytes of the fullest GPU, which the paper minimises."""
        return max(self.stage_peaks(plan))

    def is_plan(self, plan: Sequence[PlannedStage]) -> bool:
        """Whether stages hold every layer once, in order, run them as is possible, and fill every node exactly."""
        first, gpu = 0, 0
        for stage in plan:
            if gpu >= self.gpus or not first < stage.end <= self.layers:
                return False
            degree = int(self.degrees[stage.configuration])
            if degree > self.room[gpu] or not self.allowed[stage.configuration, first, stage.end]:
                return False
            first, gpu = stage.end, gpu + degree
        return first == self.layers and gpu == self.gpus

    def words(self, plan: CapturePlan) -> str:
        """A plan in words: layers and configuration of every stage."""
        return " ".join(
            f"{stage.end - first}x{self.configurations[stage.configuration]}" for first, stage in self.stages(plan)
        )


def powers_of_two(largest: int) -> list[int]:
    """Return the powers of two up to a number, ascending."""
    return [1 << power for power in range(largest.bit_length())]


def stage_configurations(degrees: Iterable[int], *, checkpoint: bool = False) -> tuple[LayerStrategy, ...]:
    """List the ways of running a stage: data parallelism first, degrees ascending, a single GPU once.

    Parameters
    ----------
    degrees
        Numbers of GPUs that a stage may have.
    checkpoint
        Whether layers are checkpointed, in all configurations alike.
    """
    found = []
    for dimension in (Dimension.DATA, Dimension.TENSOR):
        for degree in sorted(degrees):
            levels = (Level(dimension, degree),) if degree > 1 else ()
            found.append(LayerStrategy(levels, checkpoint))
    return tuple(dict.fromkeys(found))


def nodes_of(gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """Full nodes, and the rest on one more."""
    full, rest = divmod(gpus, gpus_per_node)
    return (gpus_per_node,) * full + ((rest,) if rest else ())


def stage_counts(gpus: int, degrees: Sequence[int]) -> list[int | None]:
    """Return the least number of stages that fill 0, 1 .. GPUs of a node exactly; None where no sum of degrees does."""
    least: list[int | None] = [0]
    for filled in range(1, gpus + 1):
        before = [least[filled - degree] for degree in degrees if degree <= filled]
        counts = [count + 1 for count in before if count is not None]
        least.append(min(counts, default=None))
    return least


def fewest_stages(gpus: int, degrees: Sequence[int]) -> int:
    """Least number of stages that fill the GPUs of a node exactly.

    Raises
    ------
    TraceError
        No sum of these degrees is the number of GPUs.
    """
    found = stage_counts(gpus, degrees)[gpus]
    if found is None:
        raise TraceError(
            f"a node of {gpus} GPUs cannot be filled by stages of {_listed(sorted(set(degrees)))} GPUs; "
            "use nodes whose GPUs are a sum of these"
        )
    return found


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
