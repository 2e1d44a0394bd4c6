"""CAPTURE's profiler, layer merger and predictor (sections III-A and III-B): the memory of any stage from few runs.

Every run is made with two sizes of micro-batch, their number kept, so that what is read of a layer is a line: bytes at
no samples, and bytes per sample. A stage is predicted to hold ``M_i`` of its first layer and ``M_a`` of all others, at
the micro-batch of the target. Degrees up to 4 are profiled; higher ones follow from degrees 2 and 4, by the paper's
``a + b ln n`` or by ``a + b / n``, which is what a fixed part and a divided part add up to.

Under 1F1B a stage that was profiled near the front held more micro-batches than it would further back. The paper
leaves that alone. Repaired, what a layer adds per sample is divided by the micro-batches in flight: that much is held
of each of them; the rest, such as workspaces and what is there at no samples, is there once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from formulations.capture.problem import PartitionProblem, TraceError, stage_configurations
from formulations.capture.profiling import ProfilingRuns, Reading, profiling_runs
from formulations.capture.replay import ProfiledSystem
from formulations.capture.slips import REPAIRED, Slip
from formulations.galvatron.strategies import LayerStrategy

__all__ = ["LayerLines", "Prediction", "Profile", "merged_borders", "predict", "profile_layers", "profiling_sizes"]

LARGEST_PROFILED = 4

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LayerLines:
    """A number of every layer as a line in the samples of a micro-batch, shape ``(L,)`` each.

    Parameters
    ----------
    fixed
        Bytes at no samples.
    slope
        Bytes per sample, with as many micro-batches in flight as where it was profiled.
    slope_in_flight
        Bytes per sample of every micro-batch in flight.
    slope_once
        Bytes per sample beside these.
    """

    fixed: FloatArray
    slope: FloatArray
    slope_in_flight: FloatArray
    slope_once: FloatArray

    def at(self, samples: int, in_flight: int | None) -> FloatArray:
        """Bytes at a micro-batch size; with as many in flight as profiled if None."""
        slope = self.slope if in_flight is None else self.slope_once + self.slope_in_flight * in_flight
        return self.fixed + slope * samples

    def merged(self, groups: Sequence[Sequence[int]]) -> LayerLines:
        """Lines of groups: the sums of their members'."""
        return LayerLines(*(np.array([part[list(group)].sum() for group in groups]) for part in self._parts))

    def plus(self, other: LayerLines) -> LayerLines:
        """Lines of the sums of two numbers."""
        return LayerLines(*(one + two for one, two in zip(self._parts, other._parts, strict=True)))

    @property
    def _parts(self) -> tuple[FloatArray, ...]:
        return self.fixed, self.slope, self.slope_in_flight, self.slope_once


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Measurements of the profiling runs.

    Parameters
    ----------
    system
        What ran; its layers are merged where they were merged.
    borders
        Borders of these layers in those of the model.
    lines
        ``M_i`` and ``M_a`` of all layers, by the configurations in which they can be run; ``M_a`` of the first is 0.
    runs
        Number of runs, both sizes counted.
    sizes
        Samples of the micro-batches of the two sizes.
    """

    system: ProfiledSystem
    borders: tuple[int, ...]
    lines: dict[LayerStrategy, tuple[LayerLines, LayerLines]]
    runs: int
    sizes: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Predicted memory.

    Parameters
    ----------
    problem
        The problem with predicted peaks.
    clamped
        Stages whose extrapolated memory was negative and is taken as 0.
    """

    problem: PartitionProblem
    clamped: int


def profiling_sizes(micro_batch: int, degrees: Iterable[int]) -> tuple[int, int]:
    """Return the sizes of micro-batch to profile with: a quarter and a half of the target's, as in the paper.

    Where a degree of data parallelism does not divide these, the two smallest that all divide.
    """
    largest = max(degrees)
    quarter = micro_batch // 4
    if micro_batch % 4 == 0 and quarter % largest == 0:
        return quarter, 2 * quarter
    return largest, 2 * largest


def profile_layers(
    system: ProfiledSystem,
    gpus: int,
    micro_batch: int,
    degrees: Sequence[int],
    *,
    checkpoint: bool = False,
    merge_to: int | None = None,
) -> Profile:
    """Run the profiling partitionings of all kinds and degrees of parallelism.

    Parameters
    ----------
    system
        What runs them.
    gpus
        GPUs to profile on; they may be others than those of the plan.
    micro_batch
        Samples of a micro-batch of the target.
    degrees
        Of which those up to 4 are profiled.
    checkpoint
        Whether layers are checkpointed.
    merge_to
        Number of layers to which pipeline-parallel profiles are merged before the others are made; None: no merging.

    Raises
    ------
    TraceError
        There are too few GPUs, or fewer layers than are to remain.
    """
    profiled = [degree for degree in degrees if degree <= LARGEST_PROFILED]
    sizes = profiling_sizes(micro_batch, profiled)
    borders = tuple(range(system.layers + 1))
    lines, count = {}, 0
    for configuration in stage_configurations(profiled, checkpoint=checkpoint):
        runs = profiling_runs(system.layers, gpus // configuration.devices)
        try:
            found = _lines(system, runs, configuration, sizes)
        except TraceError:
            continue  # the layers do not run so
        count += 2 * len(runs.partitions)
        if configuration.devices == 1 and merge_to is not None:
            alone, added = (line.at(micro_batch, None) for line in found)
            borders = merged_borders(alone, added, merge_to)
            system, found = system.merged(borders), _merged(found, borders)
        lines[configuration] = found
    return Profile(system, borders, lines, count, sizes)


def merged_borders(alone: FloatArray, added: FloatArray, count: int) -> tuple[int, ...]:
    """Merge neighbouring layers until so many remain, always the two that hold least on a GPU of their own.

    A merged layer has ``M_i(l) + M_a(l + 1)`` and ``M_a(l) + M_a(l + 1)``.

    Parameters
    ----------
    alone, added
        ``M_i`` and ``M_a`` of the layers, shape ``(L,)``.
    count
        Layers that remain.

    Returns
    -------
    tuple of int
        ``count + 1`` borders.

    Raises
    ------
    TraceError
        There are not so many layers.
    """
    if not 1 <= count <= len(alone):
        raise TraceError(f"merging {len(alone)} layers to {count}: ask for 1 to {len(alone)}")
    single, more, borders = alone.tolist(), added.tolist(), list(range(len(alone) + 1))
    while len(single) > count:
        together = [single[layer] + more[layer + 1] for layer in range(len(single) - 1)]
        layer = together.index(min(together))
        single[layer : layer + 2] = [together[layer]]
        more[layer : layer + 2] = [more[layer] + more[layer + 1]]
        del borders[layer + 1]
    return tuple(borders)


def predict(profile: Profile, problem: PartitionProblem, micro_batch: int, slips: Slip = REPAIRED) -> Prediction:
    """Predict the memory of all stages.

    Parameters
    ----------
    profile
        Of the problem's layers.
    problem
        Nodes, configurations, and what is possible; its peaks are replaced.
    micro_batch
        Samples of a micro-batch.
    slips
        Of these ``LOG_FIT`` and ``POSITION_1F1B`` are kept as printed.
    """
    in_flight: list[int | None] = [None]
    if Slip.POSITION_1F1B not in slips:
        stages = problem.gpus + 1
        held = [profile.system.in_flight(stages, stages - 1 - behind) for behind in range(problem.gpus)]
        in_flight = [*held[: held.index(held[-1]) + 1]]
    allowed = problem.allowed.copy()
    peaks = np.zeros((len(in_flight), *allowed.shape), dtype=np.int64)
    clamped = 0
    for number, configuration in enumerate(problem.configurations):
        if not _is_known(profile, configuration):
            allowed[number] = False
            continue
        for row, held_there in enumerate(in_flight):
            bytes_of_stages = _stage_bytes(profile, configuration, micro_batch, held_there, slips)
            if held_there is not None:  # without a pipeline a micro-batch ends before the next begins
                alone = _stage_bytes(profile, configuration, micro_batch, profile.system.in_flight(1, 0), slips)
                bytes_of_stages[0, -1] = alone[0, -1]
            whole = np.rint(bytes_of_stages)
            clamped += int(((whole < 0) & allowed[number]).sum())
            peaks[row, number] = np.maximum(whole, 0)
    return Prediction(replace(problem, peaks=peaks, allowed=allowed), clamped)


def _lines(
    system: ProfiledSystem, runs: ProfilingRuns, configuration: LayerStrategy, sizes: tuple[int, int]
) -> tuple[LayerLines, LayerLines]:
    """Lines of ``M_i`` and of ``M_a``."""
    measured = np.array([_measured(system, runs, configuration, size) for size in sizes])
    slopes = (measured[1] - measured[0]) / (sizes[1] - sizes[0])
    fixed = measured[0] - slopes * sizes[0]
    places = tuple(np.array(runs.alone).T)
    held = np.array([_in_flight(system, runs, reading) for reading in runs.alone])
    each = np.zeros(len(runs.alone))
    more = np.zeros((2, len(runs.alone)))
    for layer, (longer, shorter) in enumerate(runs.added, start=1):
        more[:, layer] = fixed[longer] - fixed[shorter], slopes[longer] - slopes[shorter]
        there, before = _in_flight(system, runs, longer), _in_flight(system, runs, shorter)
        held_more = (there - before) * each[slice(*runs.group(shorter))].sum()
        each[layer] = (more[1, layer] - held_more) / there
    if len(each) == 1:
        each[0] = slopes[runs.alone[0]] / held[0]
    else:  # what the first layer adds to the second, whose workspace is there with and without it
        longer = runs.added[0][0]
        there = _in_flight(system, runs, longer)
        each[0] = (slopes[longer] - slopes[runs.alone[1]] - (there - held[1]) * each[1]) / there
    alone = LayerLines(fixed[places], slopes[places], each, slopes[places] - held * each)
    added_each = np.array([0.0, *each[1:]])
    return alone, LayerLines(more[0], more[1], added_each, np.zeros(len(each)))


def _in_flight(system: ProfiledSystem, runs: ProfilingRuns, reading: Reading) -> int:
    run, stage = reading
    return system.in_flight(len(runs.partitions[run]), stage)


def _measured(
    system: ProfiledSystem, runs: ProfilingRuns, configuration: LayerStrategy, size: int
) -> list[list[float]]:
    """Bytes by run and stage; 0 where a run has fewer stages."""
    most = max(map(len, runs.partitions))
    found = [system.run(partition, configuration, size) for partition in runs.partitions]
    return [[*map(float, peaks), *[0.0] * (most - len(peaks))] for peaks in found]


def _merged(found: tuple[LayerLines, LayerLines], borders: Sequence[int]) -> tuple[LayerLines, LayerLines]:
    """Lines of merged layers, by the formulas of :func:`merged_borders`."""
    alone, added = found
    groups = [range(first, end) for first, end in pairwise(borders)]
    rest, firsts = added.merged([group[1:] for group in groups]), alone.merged([group[:1] for group in groups])
    return firsts.plus(rest), added.merged(groups)


def _is_known(profile: Profile, configuration: LayerStrategy) -> bool:
    """Whether a configuration was profiled, or the two were that it follows from."""
    if configuration.devices <= LARGEST_PROFILED:
        return configuration in profile.lines
    return all(_of_degree(configuration, degree) in profile.lines for degree in (2, LARGEST_PROFILED))


def _of_degree(configuration: LayerStrategy, degree: int) -> LayerStrategy:
    return replace(configuration, levels=tuple(replace(level, degree=degree) for level in configuration.levels))


def _stage_bytes(
    profile: Profile, configuration: LayerStrategy, micro_batch: int, in_flight: int | None, slips: Slip
) -> FloatArray:
    """Bytes of all groups of layers in one configuration, shape ``(L, L + 1)``; meaningless where they are empty."""
    degree = configuration.devices
    if degree <= LARGEST_PROFILED:
        alone, added = (line.at(micro_batch, in_flight) for line in profile.lines[configuration])
        sums = np.concatenate([[0.0], np.cumsum(added)])
        additive: FloatArray = (alone - sums[1:])[:, None] + sums[None, :]
        return additive
    two, four = (
        _stage_bytes(profile, _of_degree(configuration, known), micro_batch, in_flight, slips)
        for known in (2, LARGEST_PROFILED)
    )
    logarithm: FloatArray = two + (four - two) * (np.log2(degree) - 1)
    reciprocal: FloatArray = 2 * four - two + 4 * (two - four) / degree
    return logarithm if Slip.LOG_FIT in slips else reciprocal
