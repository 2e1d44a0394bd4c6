"""The convex combination of paths with the best bound on plans that overlap, from the plans seen so far.

The paths are those of :mod:`formulations.step.weights`, with cuts at some operators. Every plan has a time on every
path, a lower bound on how long its step takes. The combination whose least time over all plans is largest is the best
one; over the plans seen so far it is a small linear program (Kelley's cutting planes). Its solution makes the weights
of the next canonical problem, whose optimum is a proven bound and one more plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formulations.problem.strategy_problem import IntArray
from formulations.step.replay import Tally
from formulations.step.training_step import NodeKind, StepModel
from formulations.step.weights import StepWeights

SCALE = 1024
"""Weights are in parts of it: bounds lose less than the part of one path."""

CENTRE_SHARE = 0.6
"""Part of the weights with the best bound so far in the next ones: the program's solutions jump while plans are few."""

CUTS = 24
"""Operators at which paths may change between links and computation, beside the first and the last."""


@dataclass(frozen=True, slots=True)
class Path:
    """Gathers before operator ``first`` on link ``head``, the computation up to ``last``, then reductions on ``tail``.

    ``head`` and ``tail`` are None where there is no such part; where ``first`` is ``last`` there is no computation. A
    path without computation carries all gathers and reductions of its link. One without tail has all updates.
    """

    first: int
    last: int
    head: int | None
    tail: int | None

    @property
    def is_one_link(self) -> bool:
        """Whether it is all that one link carries."""
        return self.first == self.last and self.head == self.tail and self.head is not None


def paths(model: StepModel, axes: int, cuts: int = CUTS) -> tuple[Path, ...]:
    """Paths with cuts spread over the operators that compute."""
    kinds = (NodeKind.FORWARD, NodeKind.BACKWARD)
    operators = [i for i, node in enumerate(model.nodes) if node.kind in kinds]
    begin, end = operators[0], operators[-1] + 1
    spread = sorted({begin, *(operators[k * len(operators) // (cuts + 1)] for k in range(1, cuts + 1)), end - 1, end})
    found = [Path(begin, end, None, None)]
    for axis in range(axes):
        found.append(Path(begin, begin, axis, axis))
        found += [Path(cut, end, axis, None) for cut in spread if begin < cut < end]
        found += [Path(begin, cut, None, axis) for cut in spread if begin < cut < end]
        found += [
            Path(first, last, head, axis)
            for head in range(axes)
            for first in spread
            for last in spread
            if begin < first <= last < end and not (first == last and head == axis)
        ]
    return tuple(found)


def weights_of(path: Path, nodes: int, axes: int) -> StepWeights:
    """Weights of one path."""
    computation = np.zeros(nodes, dtype=np.int64)
    activations, gathers, reductions = (np.zeros((axes, nodes), dtype=np.int64) for _ in range(3))
    if path.is_one_link:
        for table in (activations, gathers, reductions):
            table[path.head] = 1
        return StepWeights(1, computation, activations, gathers, reductions, 0)
    computation[path.first : path.last] = 1
    if path.head is not None:
        gathers[path.head, : path.first] = activations[path.head, : path.first] = 1
    if path.tail is not None:
        reductions[path.tail, path.last :] = activations[path.tail, path.last :] = 1
    return StepWeights(1, computation, activations, gathers, reductions, int(path.tail is None))


def path_times(found: Sequence[Path], tally: Tally) -> IntArray:
    """Time of a plan on each path, shape ``(paths,)``; as its costs times :func:`weights_of` the path, from sums."""

    def sums(costs: IntArray) -> IntArray:
        return np.concatenate([np.zeros((*costs.shape[:-1], 1), dtype=np.int64), costs.cumsum(axis=-1)], axis=-1)

    computation = sums(tally.computation)
    heads, tails = sums(tally.activations + tally.gathers), sums(tally.activations + tally.reductions)
    whole = (tally.activations + tally.gathers + tally.reductions).sum(axis=1)

    def time(path: Path) -> int:
        if path.is_one_link:
            return int(whole[path.head])
        before = 0 if path.head is None else heads[path.head, path.first]
        behind = tally.updates if path.tail is None else tails[path.tail, -1] - tails[path.tail, path.last]
        return int(before + computation[path.last] - computation[path.first] + behind)

    return np.array([time(path) for path in found], dtype=np.int64)


class Multipliers:
    """Paths, their times under the plans seen so far, and the best combination.

    Parameters
    ----------
    model
        The step.
    axes
        Number of mesh axes.
    """

    def __init__(self, model: StepModel, axes: int) -> None:
        self._nodes, self._axes = len(model.nodes), axes
        self._paths = paths(model, axes)
        self._times: list[IntArray] = []
        self._centre = np.zeros(len(self._paths))
        self._centre[0] = 1.0
        self._tried = self._centre

    def see(self, tally: Tally) -> None:
        """Take a plan."""
        self._times.append(path_times(self._paths, tally))

    def longest(self, tally: Tally) -> int:
        """The longest path of a plan: no schedule of it takes less."""
        return int(path_times(self._paths, tally).max())

    def keep(self) -> None:
        """Take the last weights as those with the best bound so far."""
        self._centre = self._tried

    def next(self) -> StepWeights:
        """Weights between the best ones so far and those whose least time over the plans seen is largest."""
        best = _best_combination(np.stack(self._times).astype(np.float64))
        shares = self._tried = CENTRE_SHARE * self._centre + (1.0 - CENTRE_SHARE) * best
        parts = np.floor(shares * SCALE + 1e-9).astype(np.int64)
        parts[int(shares.argmax())] += SCALE - int(parts.sum())
        return _combined(
            [
                (int(part), weights_of(path, self._nodes, self._axes))
                for part, path in zip(parts, self._paths, strict=True)
                if part
            ]
        )


def _combined(parts: Sequence[tuple[int, StepWeights]]) -> StepWeights:
    return StepWeights(
        sum(part for part, _ in parts),
        np.sum([part * weights.computation for part, weights in parts], axis=0),
        np.sum([part * weights.activations for part, weights in parts], axis=0),
        np.sum([part * weights.gathers for part, weights in parts], axis=0),
        np.sum([part * weights.reductions for part, weights in parts], axis=0),
        sum(part * weights.updates for part, weights in parts),
    )


def _best_combination(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shares of the paths, which add up to one, with the largest least time; ``times`` of shape ``(plans, paths)``."""
    import highspy

    plans, count = times.shape
    scaled = times / max(1.0, float(times.max()))
    program = highspy.Highs()
    program.setOptionValue("output_flag", False)
    for _ in range(count):
        program.addVar(0.0, 1.0)
    program.addVar(0.0, highspy.kHighsInf)
    program.changeColCost(count, -1.0)
    everything = np.arange(count + 1, dtype=np.int32)
    program.addRow(1.0, 1.0, count, everything[:count], np.ones(count))
    for plan in range(plans):
        program.addRow(0.0, highspy.kHighsInf, count + 1, everything, np.append(scaled[plan], -1.0))
    program.run()
    shares = np.clip(np.array(program.getSolution().col_value[:count]), 0.0, None)
    return np.asarray(shares / shares.sum(), dtype=np.float64)
