"""CAPTURE's recommender (Algorithm 4) and mCAP's brute force: plans one after the other, in the paper's order.

Groups of layers are placed in order, shorter ones first, each by data parallelism, then by tensor parallelism, degrees
ascending. A branch ends where too few layers are left for the GPUs. A configuration is left out where it is predicted
to hold more than the peak of the best plan so far. The number of plans is exponential in the GPUs, so the search has a
limit and says whether it reached it; :mod:`formulations.capture.exact` finds what it would find.

mCAP is the same for pipelines alone: its brute force looks at all ``binomial(L - 1, G - 1)`` partitions without leaving
any out. mCAP-BO, which looks at a fixed number of them by Bayesian optimisation, is no part of CAPTURE, neither of its
algorithms nor of its evaluation, which compares with mCAP nowhere (section IV), and the paper does not say how it
works; it is not built.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from formulations.capture.kernels import comes_before
from formulations.capture.problem import CapturePlan, PartitionProblem, PlannedStage, stage_counts
from formulations.capture.slips import REPAIRED, Slip
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = ["Recommendation", "pipeline_only", "recommend", "search_mcap"]

DEFAULT_PLACEMENT_LIMIT = 50_000_000
"""Placements of stages, before the search gives up: about a second."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What an enumeration returns.

    Parameters
    ----------
    plan
        The best plan by the predictions, None where none was reached.
    complete
        Whether all plans were seen or rightly left out.
    placements
        Stages placed.
    """

    plan: CapturePlan | None
    complete: bool
    placements: int


def recommend(
    problem: PartitionProblem,
    slips: Slip = REPAIRED,
    *,
    prune: bool = True,
    placement_limit: int = DEFAULT_PLACEMENT_LIMIT,
) -> Recommendation:
    """Run Algorithm 4.

    Parameters
    ----------
    problem
        Predicted memory.
    slips
        Of these ``ALG4_TIES_LOST``, ``ALG4_LOOP`` and ``TIES_DISTINCT`` are kept as printed.
    prune
        Whether configurations over the best peak so far are left out.
    placement_limit
        Stages to be placed at most.

    Raises
    ------
    ValueError
        Memory depends on the stages behind, of which an enumeration from the first layer on knows nothing.
    """
    if len(problem.peaks) > 1:
        raise ValueError(
            "an enumeration takes memory that does not depend on a stage's place, as the paper predicts it; "
            "use formulations.capture.exact for memory by place"
        )
    stages, complete, placements = _enumerate(
        problem.peaks[0],
        problem.allowed,
        problem.degrees,
        problem.room,
        _fewest_from(problem),
        _order(problem, slips),
        Slip.ALG4_TIES_LOST in slips,
        Slip.TIES_DISTINCT in slips,
        prune,
        placement_limit,
    )
    plan = tuple(PlannedStage(end, configuration) for end, configuration in stages.tolist())
    return Recommendation(plan or None, bool(complete), int(placements))


def pipeline_only(problem: PartitionProblem) -> PartitionProblem:
    """Return the problem of stages with one GPU each."""
    single = np.flatnonzero(problem.degrees == 1)
    return replace(
        problem,
        configurations=tuple(problem.configurations[c] for c in single),
        peaks=problem.peaks.take(single, axis=1),
        allowed=problem.allowed.take(single, axis=0),
    )


def search_mcap(problem: PartitionProblem, placement_limit: int = DEFAULT_PLACEMENT_LIMIT) -> Recommendation:
    """Run mCAP-BF: every partition of the layers over single GPUs, the first of least peak.

    Raises
    ------
    TraceError
        There are more GPUs than layers.
    """
    return recommend(pipeline_only(problem), Slip.ALG4_TIES_LOST, prune=False, placement_limit=placement_limit)


def _order(problem: PartitionProblem, slips: Slip) -> IntArray:
    """Numbers of the configurations in the order in which they are tried."""
    count = len(problem.configurations)
    if Slip.ALG4_LOOP not in slips:
        return np.arange(count)
    below = [c for c in range(count) if problem.degrees[c] < max(problem.nodes)]
    tensor = next((c for c in below if _is_tensor(problem, c)), len(below))
    single = [c for c in below if problem.degrees[c] == 1]
    return np.array([*below[:tensor], *single, *below[tensor:]], dtype=np.int64)


def _is_tensor(problem: PartitionProblem, c: int) -> bool:
    configuration = problem.configurations[c]
    return configuration.devices > 1 and configuration.sample_parts == 1


def _fewest_from(problem: PartitionProblem) -> IntArray:
    """Least number of stages on the GPUs from each one on, shape ``(G + 1,)``; more than layers where impossible."""
    behind = [0]
    for node in reversed(problem.nodes):
        counts = stage_counts(node, problem.degrees.tolist())
        least = [problem.layers + 1 if count is None else count + behind[0] for count in counts]
        behind = [*reversed(least[1:]), *behind]
    return np.array(behind, dtype=np.int64)


@compiled
def _enumerate(
    peaks: IntArray,
    allowed: BoolArray,
    degrees: IntArray,
    room: IntArray,
    fewest: IntArray,
    order: IntArray,
    ties_lost: bool,
    distinct: bool,
    prune: bool,
    placement_limit: int,
) -> tuple[IntArray, bool, int]:
    """Enumerate depth first; arguments as of :func:`recommend` and its helpers.

    Returns
    -------
    stages, complete, placements
        End and configuration of every stage, shape ``(P, 2)``, empty where no plan was reached.
    """
    layers, gpus = peaks.shape[1], len(room)
    first = np.zeros(gpus + 1, dtype=np.int64)
    gpu = np.zeros(gpus + 1, dtype=np.int64)
    end = np.zeros(gpus + 1, dtype=np.int64)
    cursor = np.zeros(gpus + 1, dtype=np.int64)
    stages = np.zeros((gpus, 2), dtype=np.int64)
    values = np.zeros(gpus, dtype=np.int64)
    best, best_count, best_peak = stages.copy(), 0, 0
    best_vector, vector = np.zeros(gpus, dtype=np.int64), np.zeros(gpus, dtype=np.int64)
    placements, depth = 0, 0
    end[0] = 1
    if not len(order):
        return best[:0], True, 0
    while depth >= 0:
        if cursor[depth] == len(order):
            cursor[depth] = 0
            end[depth] += 1
        if end[depth] > layers:
            depth -= 1
            continue
        c, last = order[cursor[depth]], end[depth]
        cursor[depth] += 1
        if degrees[c] > room[gpu[depth]] or not allowed[c, first[depth], last]:
            continue
        filled = gpu[depth] + degrees[c]
        if layers - last < fewest[filled] or (filled == gpus and last < layers):
            continue
        peak = peaks[c, first[depth], last]
        if prune and best_count and peak > best_peak:
            continue
        placements += 1
        if placements > placement_limit:
            return best[:best_count].copy(), False, placements - 1
        stages[depth] = (last, c)
        values[depth] = peak
        if last < layers:
            depth += 1
            first[depth], gpu[depth], end[depth], cursor[depth] = last, filled, last + 1, 0
            continue
        plan_peak = values[: depth + 1].max()
        better = best_count == 0 or plan_peak < best_peak
        if not better and (ties_lost or plan_peak > best_peak):
            continue
        if not ties_lost:
            _descending(values[: depth + 1], stages, degrees, distinct, vector)
            better = better or comes_before(vector, best_vector)
        if better:
            best[:], best_vector[:] = stages, vector
            best_count, best_peak = depth + 1, plan_peak
    return best[:best_count].copy(), True, placements


@compiled
def _descending(values: IntArray, stages: IntArray, degrees: IntArray, distinct: bool, vector: IntArray) -> None:
    """Write the bytes of all GPUs in descending order, each once if `distinct`; -1 behind the last."""
    vector[:] = -1
    ordered = np.argsort(-values)
    count = 0
    for k in ordered:
        if distinct:
            if count == 0 or vector[count - 1] != values[k]:
                vector[count] = values[k]
                count += 1
        else:
            for _ in range(degrees[stages[k, 1]]):
                vector[count] = values[k]
                count += 1
