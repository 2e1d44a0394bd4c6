"""The compiled loops of :mod:`formulations.capture.exact`, over layers, GPUs and stages behind."""

from __future__ import annotations

import numpy as np

from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = ["COUNTED", "cheapest_stages", "comes_before", "least_vector_stages"]

COUNTED = -1
"""The least cost that a stage may have where the largest counts."""

_NONE = 2**62


@compiled
def cheapest_stages(costs: IntArray, usable: BoolArray, degrees: IntArray, room: IntArray, sums: bool) -> IntArray:
    """Find the plan of least sum or least maximum of its stages' costs.

    Parameters
    ----------
    costs, usable
        Of stages by stages behind, configuration, first layer and end, shape ``(S, C, L, L + 1)``.
    degrees
        GPUs of configurations, shape ``(C,)``.
    room
        GPUs from each one to the end of its node, shape ``(G,)``.
    sums
        Whether costs add up, or the largest counts.

    Returns
    -------
    IntArray
        End and configuration of every stage, shape ``(P, 2)``; empty where there is no plan. Of equal ways on from a
        state the one that ends first and has the first configuration.
    """
    rows, configurations, layers = costs.shape[:3]
    gpus = len(room)
    best = np.full((rows, layers + 1, gpus + 1), _NONE)
    ways = np.zeros((rows, layers + 1, gpus + 1, 3), dtype=np.int64)
    best[0, layers, gpus] = 0 if sums else COUNTED
    for gpu in range(gpus - 1, -1, -1):
        for first in range(layers - 1, -1, -1):
            for end in range(first + 1, layers + 1):
                for c in range(configurations):
                    if degrees[c] > room[gpu]:
                        continue
                    for behind in range(rows):
                        rest = best[behind, end, gpu + degrees[c]]
                        if rest == _NONE or not usable[behind, c, first, end]:
                            continue
                        cost = costs[behind, c, first, end]
                        total = cost + rest if sums else max(cost, rest)
                        state = min(behind + 1, rows - 1)
                        if total < best[state, first, gpu]:
                            best[state, first, gpu] = total
                            ways[state, first, gpu] = (end, c, behind)
    start = int(best[:, 0, 0].argmin())
    if best[start, 0, 0] == _NONE:
        return np.zeros((0, 2), dtype=np.int64)
    return _walk(ways, start, degrees)


@compiled
def least_vector_stages(peaks: IntArray, allowed: BoolArray, degrees: IntArray, room: IntArray) -> IntArray:
    """Find the plan whose descending vector of all GPUs' bytes is the least.

    Parameters
    ----------
    peaks, allowed
        As in :class:`PartitionProblem`.
    degrees, room
        As for :func:`cheapest_stages`.

    Returns
    -------
    IntArray
        As of :func:`cheapest_stages`; with one row of `peaks` the first plan of all that are equal.
    """
    rows, configurations, layers = peaks.shape[:3]
    gpus = len(room)
    best = np.zeros((rows, layers + 1, gpus + 1, gpus), dtype=np.int64)
    found = np.zeros((rows, layers + 1, gpus + 1), dtype=np.bool_)
    ways = np.zeros((rows, layers + 1, gpus + 1, 3), dtype=np.int64)
    found[0, layers, gpus] = True
    vector = np.zeros(gpus, dtype=np.int64)
    for gpu in range(gpus - 1, -1, -1):
        length = gpus - gpu
        for first in range(layers - 1, -1, -1):
            for end in range(first + 1, layers + 1):
                for c in range(configurations):
                    degree = degrees[c]
                    if degree > room[gpu] or not allowed[c, first, end]:
                        continue
                    for behind in range(rows):
                        if not found[behind, end, gpu + degree]:
                            continue
                        peak = peaks[behind, c, first, end]
                        rest = best[behind, end, gpu + degree]
                        above = 0
                        while above < length - degree and rest[above] >= peak:
                            vector[above] = rest[above]
                            above += 1
                        vector[above : above + degree] = peak
                        for k in range(above, length - degree):
                            vector[k + degree] = rest[k]
                        state = min(behind + 1, rows - 1)
                        if not found[state, first, gpu] or comes_before(
                            vector[:length], best[state, first, gpu, :length]
                        ):
                            found[state, first, gpu] = True
                            best[state, first, gpu] = vector
                            ways[state, first, gpu] = (end, c, behind)
    start = -1
    for state in range(rows):
        if found[state, 0, 0] and (start < 0 or comes_before(best[state, 0, 0], best[start, 0, 0])):
            start = state
    if start < 0:
        return np.zeros((0, 2), dtype=np.int64)
    return _walk(ways, start, degrees)


@compiled
def comes_before(vector: IntArray, other: IntArray) -> bool:
    """Whether a vector is less than another of the same length where they first differ."""
    for k in range(len(vector)):
        if vector[k] != other[k]:
            return bool(vector[k] < other[k])
    return False


@compiled
def _walk(ways: IntArray, start: int, degrees: IntArray) -> IntArray:
    """Follow the ways from the first layer and GPU."""
    layers, gpus = ways.shape[1] - 1, ways.shape[2] - 1
    stages = np.zeros((gpus, 2), dtype=np.int64)
    count, state, layer, gpu = 0, start, 0, 0
    while layer < layers:
        end, c, behind = ways[state, layer, gpu]
        stages[count, 0] = end
        stages[count, 1] = c
        count += 1
        state, layer, gpu = behind, end, gpu + degrees[c]
    return stages[:count]
