"""H3T's segment simulator: what every segment of a synchronized step costs, by the switches that it depends on.

A segment is run on its own, once for every combination (Algorithm 4's ``ModelSimulator(r, s, r)``, cached), and once
for all layers that are alike and have neighbours alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from formulations.h3t.operations import ALL_ON, HANDED_OVER, Switch, Tensor
from formulations.h3t.problem import H3tLayer, H3tStep, Outcome
from formulations.h3t.simulator import simulate_runs
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = [
    "HANDED_OVER_SETS",
    "SYNCHRONIZED_SETS",
    "LayerTables",
    "SegmentTables",
    "handed_over",
    "lazy",
    "segment_tables",
]

SYNCHRONIZED_SETS = 64
"""Sets of switches once synchronization is on: indices into tables; the switches are those of the same bits."""

HANDED_OVER_SETS = 8
"""Values of :func:`handed_over`."""

_TIME, _PEAK = 0, 1
_WINDOW, _OWN = 5, 2


def handed_over(sets: IntArray) -> IntArray:
    """Hidden offloading, partition and lazy prefetching of sets of switches as a number 0 .. 7."""
    return (sets & int(HANDED_OVER)) // int(Switch.OFFLOAD_HIDDEN)


def lazy(sets: IntArray) -> IntArray:
    """1 where lazy prefetching is on."""
    return (sets & int(Switch.LAZY_PREFETCH)) // int(Switch.LAZY_PREFETCH)


@dataclass(frozen=True, slots=True, eq=False)
class LayerTables:
    """What ``ModelSimulator`` returns for every layer: both of its segments together, borders at the nearest layer.

    Parameters
    ----------
    time
        Quanta by what the layer below hands over, the layer's switches, and lazy prefetching of the layer above, shape
        ``(N, 8, 64, 2)``. Below the first layer and above the last one nothing depends on these.
    peak
        Bytes above what lower layers keep and all resident shards, same shape.
    kept, resident
        As of :class:`SegmentTables`.
    """

    time: IntArray
    peak: IntArray
    kept: IntArray
    resident: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTables:
    """A synchronized step in pieces; ``N`` layers, quanta and bytes.

    Parameters
    ----------
    forward
        Time and own peak of forward segments 0 .. N, by switches and lazy prefetching of the next layer, shape
        ``(2, N + 1, 64, 2)``. The own peak is above what lower layers keep and all resident shards.
    backward
        The same of backward segments 0 .. N + 1 by switches and what the layer below hands over, shape
        ``(2, N + 2, 64, 8)``.
    kept, resident
        Bytes that layers keep between their segments, and all the time, shape ``(N, 64)``.
    reload
        Quanta of loading resident shards, shape ``(N, 64)``.
    fixed_bytes, fixed_cost
        Whatever the switches.
    """

    forward: IntArray
    backward: IntArray
    kept: IntArray
    resident: IntArray
    reload: IntArray
    fixed_bytes: int
    fixed_cost: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.kept)

    def by_layer(self) -> LayerTables:
        """The same with every segment counted at one layer, as the paper's searches want it."""
        forward, backward = self.forward[..., None, :, :], self.backward.swapaxes(2, 3)[..., None]
        time = forward[_TIME, 1:] + backward[_TIME, 1:-1] + self.reload[:, None, :, None]
        peak = np.maximum(forward[_PEAK, 1:], backward[_PEAK, 1:-1])
        sets = np.arange(SYNCHRONIZED_SETS)
        first, turn = self.forward[:, 0, 0, lazy(sets)], self.backward[:, -1, 0, handed_over(sets)]
        last = self.backward[:, 0, 0, 0]
        time[0] += (first[_TIME] + last[_TIME])[:, None]
        time[-1] += turn[_TIME][:, None]
        peak[0] = np.maximum(peak[0], np.maximum(first[_PEAK], last[_PEAK])[:, None])
        peak[-1] = np.maximum(peak[-1], (self.kept[-1] + turn[_PEAK])[:, None])
        return LayerTables(time, peak, self.kept, self.resident)

    def without(self, forbidden: BoolArray, memory_limit: int) -> SegmentTables:
        """Tables in which forbidden sets of layers, shape ``(N, 64)``, need twice the limit while they compute.

        So they do not fit either where bytes are rounded to parts of the limit.
        """
        forward = self.forward.copy()
        forward[_PEAK, 1:][forbidden] = min(2 * memory_limit + 1, 2**62)
        return replace(self, forward=forward)

    def outcome(self, sequence: Sequence[int]) -> Outcome:
        """Cost and peak of a synchronized sequence, sets 0 .. 63."""
        width = self.layers + 2
        sets = np.zeros(width, dtype=np.int64)
        sets[1:-1] = sequence
        rows, inner = np.arange(width), np.arange(self.layers)
        forward = self.forward[:, rows[:-1], sets[:-1], lazy(sets[1:])]
        backward = self.backward[:, rows, sets, handed_over(np.concatenate(([0], sets[:-1])))]
        kept = self.kept[inner, sets[1:-1]]
        # What the layers below keep: nothing below the embedding and the first layer.
        below = np.concatenate(([0, 0], np.cumsum(kept)))
        resident, reload = self.resident[inner, sets[1:-1]].sum(), self.reload[inner, sets[1:-1]].sum()
        cost = self.fixed_cost + forward[_TIME].sum() + backward[_TIME].sum() + reload
        peak = max((below[:-1] + forward[_PEAK]).max(), (below + backward[_PEAK]).max())
        return Outcome(int(cost), int(self.fixed_bytes + resident + peak))


def segment_tables(step: H3tStep) -> SegmentTables:
    """Simulate every segment with every combination of the switches that it depends on."""
    count = len(step.layers)
    # Two columns of nothing on either side, so that every layer stands in the middle of five.
    durations = np.pad(step.durations(), ((0, 0), (2, 2)), constant_values=-1)
    sizes = np.pad(step.sizes(), ((0, 0), (2, 2)))
    sets = np.arange(SYNCHRONIZED_SETS)
    forward = np.zeros((2, count + 1, SYNCHRONIZED_SETS, 2), dtype=np.int64)
    backward = np.zeros((2, count + 2, SYNCHRONIZED_SETS, HANDED_OVER_SETS), dtype=np.int64)
    neighbours = (None, *step.layers, None)
    found: dict[tuple[H3tLayer | None, ...], tuple[IntArray, IntArray]] = {}
    for i in range(count + 2):
        kind = neighbours[max(i - 1, 0) : i + 2]
        if kind not in found:
            found[kind] = _segments(durations[:, i : i + 5], sizes[:, i : i + 5], step.device_link)
        ahead, backward[:, i] = found[kind]
        if i <= count:
            forward[:, i] = ahead
    resident = lazy(sets) == 0
    return SegmentTables(
        forward=forward,
        backward=backward,
        kept=np.array([_kept(sizes[:, i + 2], sets) for i in range(1, count + 1)]),
        resident=np.array([layer.shard_bytes * resident for layer in step.layers]),
        reload=np.array([layer.shard_copy * resident for layer in step.layers]),
        fixed_bytes=step.borders.fixed_bytes,
        fixed_cost=step.final_cost,
    )


def _segments(durations: IntArray, sizes: IntArray, device_link: bool) -> tuple[IntArray, IntArray]:
    """Time and own peak of the two segments of the layer in the middle of five.

    Returns
    -------
    forward, backward
        Shapes ``(2, 64, 2)`` and ``(2, 64, 8)``.
    """
    sets = np.arange(SYNCHRONIZED_SETS)
    ahead = np.full((SYNCHRONIZED_SETS, 2, _WINDOW), int(ALL_ON), dtype=np.int64)
    ahead[:, :, _OWN] = sets[:, None]
    ahead[:, 0, _OWN + 1] ^= int(Switch.LAZY_PREFETCH)
    back = np.full((SYNCHRONIZED_SETS, HANDED_OVER_SETS, _WINDOW), int(ALL_ON), dtype=np.int64)
    back[:, :, _OWN] = sets[:, None]
    back[:, :, _OWN - 1] = np.arange(HANDED_OVER_SETS) * int(Switch.OFFLOAD_HIDDEN) + int(Switch.REMAT)
    forward = _run(durations, sizes, device_link, ahead, _OWN)
    backward = _run(durations, sizes, device_link, back, 2 * _WINDOW - 2 - _OWN)
    # Where a segment takes no time there is no moment for what is kept; the segments before and behind count it.
    backward[_PEAK] = np.maximum(0, backward[_PEAK] - _kept(sizes[:, _OWN - 1], back[:, :, _OWN - 1]))
    return forward, backward


def _run(durations: IntArray, sizes: IntArray, device_link: bool, sequences: IntArray, segment: int) -> IntArray:
    """Time and peak of one segment by the first two axes of the sequences, which come first in the result's shape."""
    found = simulate_runs(
        np.ascontiguousarray(durations),
        np.ascontiguousarray(sizes),
        device_link,
        sequences.reshape(-1, _WINDOW),
        (segment, segment + 1),
        (0, _WINDOW),
    )
    return np.ascontiguousarray(found.T).reshape(2, *sequences.shape[:2])


def _kept(sizes: IntArray, sets: IntArray) -> IntArray:
    """Bytes that a layer keeps between its segments, by its switches."""
    switched = (
        (Tensor.HIDDEN, Switch.OFFLOAD_HIDDEN),
        (Tensor.ACTIVATIONS, Switch.REMAT),
        (Tensor.PARAMETERS, Switch.PARTITION),
    )
    kept: IntArray = sum((sizes[tensor] * (sets & int(switch) == 0) for tensor, switch in switched), 0 * sets)
    return kept
