r"""What a stage of consecutive layers holds and takes: the system that CAPTURE profiles, by replay.

The paper runs its profiling partitionings on the machine. Here the profiled system is a choice: this replay, from
profiles of single layers, or anything else that gives the peaks of a partitioning (:class:`ProfiledSystem`), such as
local runs. Reports name it.

A stage holds parameters, gradients and optimizer states, and of every micro-batch in flight what forward leaves. While
the last of ``f`` micro-batches passes through layer ``l``, the other ``f - 1`` are held in full, so the peak is

.. math:: \sum_k O_{ms}(k) + (f - 1) \sum_k O_f(k) + \max_l \Bigl(\sum_{k < l} O_f(k) + \max(W_f(l), O_f(l) +
          O_b(l))\Bigr)

with ``O_ms``, ``O_f``, ``O_b`` of :mod:`formulations.galvatron.costs` and ``W_f`` what forward of a layer needs:
its input and results, its output, and its workspace. Data parallelism divides samples, tensor parallelism what it
divides of the layers. Under GPipe ``f`` is the number ``m`` of micro-batches, under 1F1B ``min(m, stages behind + 1)``.

A step takes ``(m - 1) max C' + sum C`` over stages as in Galvatron-BMW (its Eq. 5 and 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Protocol, Self

import numpy as np

from formulations.capture.problem import CapturePlan, PartitionProblem, TraceError
from formulations.galvatron.costs import CostModel, layer_tables
from formulations.galvatron.strategies import Dimension, LayerStrategy
from formulations.layers.layer import LayerChain, LayerProfile
from formulations.layers.pipeline_schedule import Schedule
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = ["PipelinedChain", "ProfiledSystem", "StageReplay", "StepTimes", "layer_borders"]


class ProfiledSystem(Protocol):
    """A system that runs a partitioning and measures the peak of every stage."""

    @property
    def name(self) -> str:
        """What it is, for reports."""
        ...

    @property
    def layers(self) -> int:
        """Number of layers."""
        ...

    def merged(self, borders: Sequence[int]) -> ProfiledSystem:
        """Return the system with layers merged: layer ``i`` is what ``borders[i] .. borders[i + 1] - 1`` were."""
        ...

    def in_flight(self, stages: int, position: int) -> int:
        """Micro-batches that a stage holds; positions count from 0."""
        ...

    def run(self, partition: Sequence[int], configuration: LayerStrategy, micro_batch: int) -> tuple[int, ...]:
        """Run a step and return the peak of every stage in bytes on one GPU.

        Parameters
        ----------
        partition
            Number of layers of every stage.
        configuration
            How every stage runs.
        micro_batch
            Samples of a micro-batch; there are as many micro-batches as in the step that is planned.

        Raises
        ------
        TraceError
            The layers cannot be run so, whatever the memory.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """How long stages take, by configuration, first layer and end, shape ``(C, L, L + 1)``, in quanta.

    Parameters
    ----------
    synchronised
        Of the last micro-batch, which synchronises gradients.
    repeated
        Of one before it.
    micro_batches
        Number of micro-batches.
    seconds_per_cost
        Length of a quantum.
    """

    synchronised: IntArray
    repeated: IntArray
    micro_batches: int
    seconds_per_cost: float

    def of(self, problem: PartitionProblem, plan: CapturePlan) -> tuple[int, int]:
        """Quanta of the slowest stage without synchronisation, and of all stages with it."""
        chosen = [(stage.configuration, first, stage.end) for first, stage in problem.stages(plan)]
        return max(int(self.repeated[stage]) for stage in chosen), sum(
            int(self.synchronised[stage]) for stage in chosen
        )

    def step(self, problem: PartitionProblem, plan: CapturePlan) -> int:
        """Quanta of a step."""
        slowest, total = self.of(problem, plan)
        return (self.micro_batches - 1) * slowest + total

    def seconds(self, problem: PartitionProblem, plan: CapturePlan) -> float:
        """Seconds of a step."""
        return self.step(problem, plan) * self.seconds_per_cost


@dataclass(frozen=True, eq=False)
class _Windows:
    """What groups of consecutive layers hold and take in one configuration, shape ``(L, L + 1)`` each.

    Parameters
    ----------
    one
        Bytes with one micro-batch in flight.
    each
        Bytes that each further one adds.
    allowed, synchronised, repeated
        As in :class:`PartitionProblem` and :class:`StepTimes`.
    """

    one: IntArray
    each: IntArray
    allowed: BoolArray
    synchronised: IntArray
    repeated: IntArray


@dataclass(frozen=True, kw_only=True)
class PipelinedChain:
    """Layers in a pipeline: what profiled systems have in common.

    Parameters
    ----------
    chain
        Profiles of the model's layers.
    borders
        Of these, those of every layer that is planned: layer ``i`` has ``borders[i] .. borders[i + 1] - 1``.
    schedule
        Order of micro-batches.
    micro_batches
        Their number, which profiling keeps.
    """

    chain: LayerChain
    borders: tuple[int, ...]
    schedule: Schedule
    micro_batches: int

    @property
    def layers(self) -> int:
        """Number of layers that are planned."""
        return len(self.borders) - 1

    def merged(self, borders: Sequence[int]) -> Self:
        """Return the system with layers merged, see :class:`ProfiledSystem`."""
        return replace(self, borders=tuple(self.borders[border] for border in borders))

    def in_flight(self, stages: int, position: int) -> int:
        """Micro-batches that a stage holds; positions count from 0."""
        return self.schedule.in_flight(stages, position, self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class StageReplay(PipelinedChain):
    """The replay of a model's stages.

    Parameters
    ----------
    chain, borders, schedule, micro_batches
        As in :class:`PipelinedChain`.
    model
        Links and states per parameter.
    """

    model: CostModel
    name: str = "replay"

    def run(self, partition: Sequence[int], configuration: LayerStrategy, micro_batch: int) -> tuple[int, ...]:
        """Return the peak of every stage, see :class:`ProfiledSystem`.

        Raises
        ------
        TraceError
            A layer cannot be run so.
        """
        windows = _windows(self, configuration, micro_batch)
        stages = list(pairwise(np.concatenate([[0], np.cumsum(partition)]).tolist()))
        for first, end in stages:
            if not windows.allowed[first, end]:
                raise TraceError(
                    f"{self.chain.name}: layers {first} to {end - 1} cannot run as {configuration} with {micro_batch} "
                    "samples; use a micro-batch that the degree divides, or leave the degree out"
                )
        return tuple(
            int(windows.one[stage] + (self.in_flight(len(stages), position) - 1) * windows.each[stage])
            for position, stage in enumerate(stages)
        )

    def problem(
        self, nodes: tuple[int, ...], configurations: Sequence[LayerStrategy], micro_batch: int
    ) -> PartitionProblem:
        """Return the problem whose memory is what stages really hold.

        Raises
        ------
        TraceError
            The GPUs cannot be filled.
        """
        windows = [_windows(self, configuration, micro_batch) for configuration in configurations]
        in_flight = self._in_flight_by_stages_behind(sum(nodes))
        peaks = np.array([[w.one + (held - 1) * w.each for w in windows] for held in in_flight])
        # Without a pipeline a micro-batch ends before the next begins.
        peaks[:, :, 0, self.layers] = [w.one[0, self.layers] for w in windows]
        return PartitionProblem(nodes, tuple(configurations), peaks, np.array([w.allowed for w in windows]))

    def times(self, configurations: Sequence[LayerStrategy], micro_batch: int) -> StepTimes:
        """Return how long stages take."""
        windows = [_windows(self, configuration, micro_batch) for configuration in configurations]
        return StepTimes(
            np.array([w.synchronised for w in windows]),
            np.array([w.repeated for w in windows]),
            self.micro_batches,
            self.model.seconds_per_cost,
        )

    def _in_flight_by_stages_behind(self, gpus: int) -> list[int]:
        """Micro-batches of a stage with 0, 1, 2 .. stages behind it, as far as they differ."""
        stages = gpus + 1  # the first stage of these has more behind it than any can have
        counts = [self.in_flight(stages, stages - 1 - behind) for behind in range(gpus)]
        return counts[: counts.index(counts[-1]) + 1]


def layer_borders(chain: LayerChain) -> tuple[int, ...]:
    """Borders where the first and the last profile (embedding, stem, head) are one layer with their neighbours.

    So a model has as many layers as it has blocks, as in the paper; three profiles or fewer stay apart.
    """
    count = len(chain)
    inner = range(2, count - 1) if count > 3 else range(1, count)
    return (0, *inner, count)


@lru_cache(maxsize=256)
def _windows(replay: StageReplay, configuration: LayerStrategy, micro_batch: int) -> _Windows:
    tables = layer_tables(replay.chain, (configuration,), micro_batch, replay.model)
    rows = tables.kinds
    states, held, backward, borrowed, synchronised, repeated = (
        table[rows, 0]
        for table in (
            tables.states,
            tables.forward,
            tables.backward,
            tables.borrowed,
            tables.synchronised,
            tables.repeated,
        )
    )
    allowed = tables.allowed[rows, 0]
    forward = np.array(
        [
            _forward_bytes(layer, configuration, micro_batch) if possible else 0
            for layer, possible in zip(replay.chain.layers, allowed, strict=True)
        ],
        dtype=np.int64,
    )
    before = _sums(held)
    worst = np.maximum(before[1:] + backward, before[:-1] + forward)
    borders = list(replay.borders)
    one, each = _differences(_sums(states), borders), _differences(before, borders)
    for row, first in enumerate(borders[:-1]):
        ends = np.array(borders[row + 1 :]) - first - 1
        one[row, row + 1 :] += (np.maximum.accumulate(worst[first:]) - before[first])[ends]
        if first > 0:  # layers before the first lend nothing to this stage
            one[row, row + 1 :] += np.maximum.accumulate(borrowed[first:])[ends]
    impossible = _differences(_sums(~allowed), borders)
    longer = np.arange(len(borders)) > np.arange(len(borders) - 1)[:, None]
    return _Windows(
        one,
        each,
        (impossible == 0) & longer,
        _differences(_sums(synchronised), borders),
        _differences(_sums(repeated), borders),
    )


def _forward_bytes(layer: LayerProfile, configuration: LayerStrategy, micro_batch: int) -> int:
    """Bytes on one device while forward of a layer runs: input, results that stay, output, workspace."""
    part = layer.on_one_of(configuration.degree(Dimension.TENSOR))
    samples = micro_batch // configuration.sample_parts
    each = part.input_bytes + part.saved_bytes + part.output_bytes + part.forward_workspace_bytes
    return samples * each + part.fixed_saved_bytes + part.forward_fixed_workspace_bytes


def _sums(values: IntArray | BoolArray) -> IntArray:
    """Sums of the first 0, 1, 2 .. values."""
    sums: IntArray = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return sums


def _differences(sums: IntArray, borders: Sequence[int]) -> IntArray:
    """Sums from every border to every other, shape ``(L, L + 1)``."""
    chosen = sums[list(borders)]
    return chosen[None, :] - chosen[:-1, None]
