"""Small random problems of CAPTURE and all of their plans, written without anything that the searches use."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from formulations.capture.problem import (
    CapturePlan,
    PartitionProblem,
    PlannedStage,
    TraceError,
    powers_of_two,
    stage_configurations,
)
from formulations.capture.replay import StepTimes

NODES = [(1,), (2,), (3,), (4,), (1, 1), (2, 1), (2, 2), (1, 2, 1), (3, 2), (4, 2), (2, 2, 2), (4, 1)]


def random_partition(seed: int, *, by_place: bool | None = None) -> PartitionProblem | None:
    """A problem of at most seven layers and six GPUs, with many equal numbers; None where the GPUs cannot be filled."""
    rng = np.random.default_rng(seed)
    nodes = NODES[rng.integers(len(NODES))]
    layers = int(rng.integers(1, 8))
    configurations = stage_configurations(powers_of_two(max(nodes)))
    placed = bool(rng.integers(2)) if by_place is None else by_place
    rows = int(rng.integers(2, 4)) if placed else 1
    largest = [3, 12, 1000][rng.integers(3)]
    shape = (rows, len(configurations), layers, layers + 1)
    peaks = rng.integers(0, largest, shape)
    if placed:
        peaks.sort(axis=0)
    longer = np.arange(layers + 1) > np.arange(layers)[:, None]
    allowed = longer & (rng.random(shape[1:]) < [0.7, 1.0][rng.integers(2)])
    try:
        return PartitionProblem(nodes, configurations, peaks, allowed)
    except TraceError:
        return None


def random_times(seed: int, problem: PartitionProblem) -> StepTimes:
    """Times of stages, synchronised no faster than repeated."""
    rng = np.random.default_rng(seed)
    shape = problem.allowed.shape
    repeated = rng.integers(0, 20, shape)
    return StepTimes(repeated + rng.integers(0, 10, shape), repeated, int(rng.integers(1, 6)), 1e-7)


def all_plans(problem: PartitionProblem, first: int = 0, node: int = 0, used: int = 0) -> Iterator[CapturePlan]:
    """Every plan, by recursion over nodes."""
    if used == problem.nodes[node]:
        node, used = node + 1, 0
    if node == len(problem.nodes):
        if first == problem.layers:
            yield ()
        return
    for end in range(first + 1, problem.layers + 1):
        for number, configuration in enumerate(problem.configurations):
            if used + configuration.devices <= problem.nodes[node] and problem.allowed[number, first, end]:
                for rest in all_plans(problem, end, node, used + configuration.devices):
                    yield (PlannedStage(end, number), *rest)


def bytes_of_gpus(problem: PartitionProblem, plan: CapturePlan) -> list[int]:
    """Bytes of every GPU."""
    found, first = [], 0
    for position, stage in enumerate(plan):
        row = min(len(problem.peaks) - 1, len(plan) - position - 1)
        peak = int(problem.peaks[row, stage.configuration, first, stage.end])
        found += [peak] * problem.configurations[stage.configuration].devices
        first = stage.end
    return found


def step_of(times: StepTimes, plan: CapturePlan) -> int:
    """Quanta of a step."""
    stages, first = [], 0
    for end, number in plan:
        stages.append((number, first, end))
        first = end
    repeated = [int(times.repeated[stage]) for stage in stages]
    return sum(int(times.synchronised[stage]) for stage in stages) + (times.micro_batches - 1) * max(repeated)


def published_winner(problem: PartitionProblem, plans: list[CapturePlan]) -> CapturePlan:
    """The paper's rule, step by step: the least peak, then all GPUs at the peak leave, then the least peak again."""
    left = [(plan, bytes_of_gpus(problem, plan)) for plan in plans]
    while True:
        least = min(max(gpus, default=-1) for _, gpus in left)
        left = [(plan, [b for b in gpus if b != least]) for plan, gpus in left if max(gpus, default=-1) == least]
        if least == -1:
            return min(plan for plan, _ in left)
