"""CAPTURE's problem solved exactly: a dynamic program over layers placed, GPUs filled and stages behind.

The paper enumerates plans. But what the layers from some layer on need, on the GPUs from some GPU on, depends on
nothing before them; only under 1F1B the number of stages behind a stage matters, and is part of the state then. So the
least peak takes ``O(L^2 G C)`` steps, times ``G`` under 1F1B. Plans are built from the last stage to the first.

Ties of the peak: descending vectors of all GPUs' bytes compare lexicographically (leximax), and stay in order when
equal numbers are put into both, so that the program may keep one vector for each state. The paper's own rule, in which
all GPUs at the peak leave and the next peak decides, has no such order; it is one least peak after the other, where
GPUs at the peaks so far count nothing.

With times, the same program finds the fastest plan whose GPUs keep a limit (the paper's future work): a step takes
``(m - 1) max C' + sum C``, and for every limit on ``C'`` the least sum is a way through the states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from formulations.capture.kernels import COUNTED, cheapest_stages, least_vector_stages
from formulations.capture.problem import CapturePlan, PartitionProblem, PlannedStage, TraceError
from formulations.capture.replay import StepTimes
from formulations.capture.slips import REPAIRED, Slip
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = ["FewestGpus", "balanced_plan", "fastest_plan", "fewest_gpus", "least_peak_plan"]


def least_peak_plan(problem: PartitionProblem, slips: Slip = REPAIRED) -> CapturePlan:
    """Find the plan whose fullest GPU holds least; of several the first by the rule for ties.

    Parameters
    ----------
    problem
        Stages and GPUs.
    slips
        Of these ``TIES_DISTINCT`` is kept as printed; leximax otherwise.

    Raises
    ------
    TraceError
        No plan is possible, because some layers run in no configuration.
    """
    if Slip.TIES_DISTINCT in slips:
        return _by_distinct_peaks(problem)
    return _plan(problem, least_vector_stages(problem.peaks, problem.allowed, problem.degrees, problem.room))


def fastest_plan(problem: PartitionProblem, times: StepTimes, limit: int | None = None) -> CapturePlan:
    """Find the plan whose step is shortest among those within a limit of memory.

    Parameters
    ----------
    problem
        Stages and GPUs.
    times
        Of the same layers and configurations.
    limit
        Bytes on one GPU; None for no limit.

    Raises
    ------
    TraceError
        No plan keeps the limit; the message says what the least peak is.
    """
    usable = _allowed(problem)
    if limit is not None:
        usable &= problem.peaks <= limit
    repeated, sums = (
        np.array(np.broadcast_to(t, usable.shape), order="C") for t in (times.repeated, times.synchronised)
    )
    if not len(cheapest_stages(sums, usable, *_shape(problem), True)):
        least = problem.peak(least_peak_plan(problem))
        raise TraceError(
            f"no plan keeps {limit} bytes on each of {problem.gpus} GPUs: the fullest GPU of the best one holds "
            f"{least}; allow as much, use more GPUs, or a smaller batch"
        )
    slowest, _ = times.of(problem, _plan(problem, cheapest_stages(repeated, usable, *_shape(problem), False)))
    _, least_sum = times.of(problem, _plan(problem, cheapest_stages(sums, usable, *_shape(problem), True)))
    best: tuple[int, CapturePlan] | None = None
    for bottleneck in np.unique(repeated[usable]).tolist():
        if bottleneck < slowest:
            continue
        if best is not None and (times.micro_batches - 1) * bottleneck + least_sum >= best[0]:
            break
        plan = _plan(problem, cheapest_stages(sums, usable & (repeated <= bottleneck), *_shape(problem), True))
        found = times.step(problem, plan)
        if best is None or found < best[0]:
            best = found, plan
    assert best is not None, "the least bottleneck is one of the stages'"
    return best[1]


def balanced_plan(problem: PartitionProblem, times: StepTimes) -> CapturePlan:
    """Find a plan whose slowest stage takes least for a micro-batch, memory left aside.

    With one GPU a stage these are the layers of equal computation that Alpa's automatic layering makes.

    Raises
    ------
    TraceError
        No plan is possible, because some layers run in no configuration.
    """
    usable = _allowed(problem)
    repeated = np.array(np.broadcast_to(times.repeated, usable.shape), order="C")
    return _plan(problem, cheapest_stages(repeated, usable, *_shape(problem), False))


@dataclass(frozen=True, slots=True)
class FewestGpus:
    """The smallest number of GPUs on which a plan keeps the limit.

    Parameters
    ----------
    problem, plan
        That number's, and the plan of least peak.
    """

    problem: PartitionProblem
    plan: CapturePlan


def fewest_gpus(problem_of: Callable[[int], PartitionProblem], limit: int, most: int) -> FewestGpus:
    """Find the fewest GPUs that fit.

    Parameters
    ----------
    problem_of
        Makes the problem of a number of GPUs.
    limit
        Bytes on one GPU.
    most
        GPUs that there are.

    Raises
    ------
    TraceError
        No number of GPUs fits; the message says which comes nearest.
    """
    nearest: tuple[int, int] | None = None
    for gpus in range(1, most + 1):
        try:
            problem = problem_of(gpus)
            plan = least_peak_plan(problem)
        except TraceError:
            continue  # a number of GPUs that these layers cannot fill
        peak = problem.peak(plan)
        if peak <= limit:
            return FewestGpus(problem, plan)
        if nearest is None or peak < nearest[0]:
            nearest = peak, gpus
    reason = "no number of GPUs can be filled" if nearest is None else f"{nearest[1]} GPUs come nearest, {nearest[0]}"
    raise TraceError(f"no number of GPUs up to {most} holds at most {limit} bytes on each: {reason}; allow more bytes")


def _shape(problem: PartitionProblem) -> tuple[IntArray, IntArray]:
    return problem.degrees, problem.room


def _allowed(problem: PartitionProblem) -> BoolArray:
    """Whether stages are possible, by stages behind too; a copy."""
    return np.array(np.broadcast_to(problem.allowed, problem.peaks.shape), order="C")


def _by_distinct_peaks(problem: PartitionProblem) -> CapturePlan:
    """The paper's rule: least peak; then least peak of the GPUs not at it; and so on until none is left."""
    usable = _allowed(problem)
    left = problem.peaks.copy()
    while True:
        plan = _plan(problem, cheapest_stages(left, usable, *_shape(problem), False))
        peak = replace(problem, peaks=left).peak(plan)
        if peak == COUNTED:
            return plan
        left[left == peak] = COUNTED
        usable &= left <= peak


def _plan(problem: PartitionProblem, stages: IntArray) -> CapturePlan:
    """Read what a kernel found; no stages are no plan.

    Raises
    ------
    TraceError
        There is no plan.
    """
    if not len(stages):
        single = np.arange(problem.layers)
        stuck = np.flatnonzero(~problem.allowed[:, single, single + 1].any(axis=0))
        reason = f"layer {stuck[0]} runs in none of them" if len(stuck) else "no cut of the layers fills the nodes"
        names = ", ".join(map(str, problem.configurations))
        raise TraceError(
            f"no plan of {problem.layers} layers on {problem.gpus} GPUs with the configurations {names}: {reason}; "
            "use a micro-batch that the degrees divide, or other degrees"
        )
    return tuple(PlannedStage(end, configuration) for end, configuration in stages.tolist())
