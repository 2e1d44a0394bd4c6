"""The weights with the best bound on plans that overlap, from the plans seen so far.

The weights are those of :mod:`formulations.step.weights`: one point of a polytope for each window. Every plan has a
least time under every weights, a lower bound on how long its step takes. The weights whose least time over all plans is
largest are the best ones; over the plans seen so far they are the solution of a small linear program (Kelley's cutting
planes). It makes the next canonical problem, whose optimum is a proven bound and one more plan.
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
from planner.replay.streams import WHOLE, Slowdowns

FloatArray = NDArray[np.float64]

SCALE = 4096
"""Weights are rounded down to parts of it."""

MOST_CENTRED = 0.9
"""Largest part of the weights with the best bound so far in the next ones. It grows while the bound does not rise, as
the program's solutions jump while plans are few, and shrinks while it does."""

STALLED, RISE = 3, 1e-4
"""The bound has stalled when it has risen by less than a part of it in so many rounds one after another."""

WINDOWS = 24
"""Parts of the computation, in each of which one stream is the longest; one more has the updates."""


@dataclass(frozen=True, slots=True)
class Corner:
    """Weights that add up to no more than the time of a window, in thousandths; a corner of the polytope.

    Parameters
    ----------
    computation, resharding
        Of the computation, and of the cost of resharded activations.
    activations, transfers
        Per mesh axis: of the time that its link takes for resharded activations, and for gathers and reductions.
    """

    computation: int
    resharding: int
    activations: tuple[int, ...]
    transfers: tuple[int, ...]


def window_ends(operators: int, windows: int) -> NDArray[np.int64]:
    """Ends of windows of equally many operators, of which the first and last are cut by halves towards the ends.

    What the first operators read can hardly be gathered beside others, and what the last ones make can hardly be
    reduced beside others.
    """
    equal = np.arange(1, windows + 1) * operators // windows
    halves = 2 ** np.arange(max(1, operators // windows).bit_length())
    ends = np.unique(np.concatenate([equal, halves, operators - halves, [operators]]))
    return ends[ends > 0]


def corners(axes: int, slowdowns: Slowdowns) -> tuple[Corner, ...]:
    """The corners of a window: the computation, the computation with a part of a link, and each link.

    While a transfer runs beside the computation, that goes on at ``WHOLE / slowdowns.computation`` of its speed and the
    transfer at ``WHOLE / slowdowns.collectives``. So weights ``c`` and ``l`` are lawful if neither is above one, nor
    ``c WHOLE / computation + l WHOLE / collectives``. A resharded activation and a transfer of its axis have half of
    the link each; beside one of another axis neither is slower, so their weights add up to no more than one.
    """
    none = (0,) * axes
    own, other = slowdowns.computation, slowdowns.collectives
    beside, before = (own - WHOLE) * other // own, (other - WHOLE) * own // other
    found = [Corner(WHOLE, WHOLE, none, none)]
    for axis in range(axes):
        some, every = (tuple(value * (a == axis) for a in range(axes)) for value in (min(WHOLE, beside), WHOLE))
        if any(some):
            found.append(Corner(WHOLE, WHOLE - max(some), some, some))
        found.append(Corner(min(WHOLE, before), 0, every, every))
    return tuple(found)


class Multipliers:
    """Windows, the times of the plans seen so far in them, and the best weights.

    Parameters
    ----------
    model
        The step, with the time on each link.
    axes
        Number of mesh axes.
    slowdowns
        Of the computation and of transfers beside each other.
    windows
        Most parts of the computation.
    """

    def __init__(self, model: StepModel, axes: int, slowdowns: Slowdowns, windows: int = WINDOWS) -> None:
        kinds = (NodeKind.FORWARD, NodeKind.BACKWARD)
        computing = np.array([node.kind in kinds for node in model.nodes])
        position = np.cumsum(computing) - computing
        operators = max(1, int(computing.sum()))
        ends = window_ends(operators, windows)
        self._last = len(ends)
        self._window = np.minimum(np.searchsorted(ends, position, side="right"), self._last - 1)
        """Of every node; the updates have window ``last``."""
        self._axes = axes
        self._corners = corners(axes, slowdowns)
        self._seen: list[FloatArray] = []
        self._centre = np.zeros(self.shape)
        self._centre[:, 0] = 1.0
        self._tried = self._centre
        self._centred = 0.0
        self._bound = self._stalled = 0

    def see(self, tally: Tally) -> None:
        """Take a plan."""
        self._seen.append(self._row(tally))

    def least(self, tally: Tally) -> int:
        """The largest of the bounds that any weights give for one plan: no schedule of it takes less, in quanta."""
        return tally.weigh(self.weights(self._best([self._row(tally)]))) // SCALE

    def raised(self, bound: int) -> bool:
        """Take the bound that the last weights gave; whether it is the best so far, so that the next are near them."""
        self._stalled = self._stalled + 1 if self._bound and bound <= (1.0 + RISE) * self._bound else 0
        if bound <= self._bound:
            self._centred = min(MOST_CENTRED, (1.0 + self._centred) / 2.0)
            return False
        self._centred /= 2.0
        self._bound, self._centre = bound, self._tried
        return True

    @property
    def has_stalled(self) -> bool:
        """Whether the bound has hardly risen for some rounds."""
        return self._stalled >= STALLED

    def begin_from(self, other: Multipliers) -> None:
        """Take the best weights of others with the same windows as those to begin near to."""
        self._centre = self._tried = other._centre

    def next(self) -> StepWeights:
        """Weights between the best ones so far and those whose least time over the plans seen is largest."""
        self._tried = self._centred * self._centre + (1.0 - self._centred) * self._best(self._seen)
        return self.weights(self._tried)

    @property
    def shape(self) -> tuple[int, int]:
        """Windows, that of the updates included, and corners."""
        return self._last + 1, len(self._corners)

    def weights(self, shares: FloatArray) -> StepWeights:
        """Integer weights of shares of corners, of :attr:`shape`, rounded down."""
        parts = np.floor(shares * SCALE + 1e-9).astype(np.int64)
        over = np.maximum(0, parts.sum(axis=1) - SCALE)
        parts[np.arange(len(parts)), parts.argmax(axis=1)] -= over
        computation = parts @ np.array([corner.computation for corner in self._corners]) // WHOLE
        resharding = parts @ np.array([corner.resharding for corner in self._corners]) // WHOLE
        activations = (parts @ np.array([corner.activations for corner in self._corners]) // WHOLE).T
        transfers = (parts @ np.array([corner.transfers for corner in self._corners]) // WHOLE).T
        gathers = np.minimum.accumulate(transfers, axis=1)
        reductions = np.minimum.accumulate(transfers[:, ::-1], axis=1)[:, ::-1]
        at = self._window
        return StepWeights(
            SCALE,
            computation[at],
            resharding[at],
            activations[:, at],
            gathers[:, at],
            reductions[:, at],
            int(computation[-1]),
        )

    # ------------------------------------------------------------------ program

    def _row(self, tally: Tally) -> FloatArray:
        """What a plan's least time is made of: coefficients of shares, weights of gathers, and of reductions."""
        windows = self._last + 1

        def summed(costs: IntArray) -> FloatArray:
            return np.bincount(self._window, costs, minlength=windows).astype(np.float64)

        computation, resharding = summed(tally.computation), summed(tally.resharding)
        computation[-1] += tally.updates
        activations, gathers, reductions = (
            np.stack([summed(costs) for costs in table])
            for table in (tally.activations, tally.gathers, tally.reductions)
        )
        shares = np.stack(
            [
                computation * corner.computation
                + resharding * corner.resharding
                + np.array(corner.activations) @ activations
                for corner in self._corners
            ],
            axis=1,
        )
        return np.concatenate([shares.ravel() / WHOLE, gathers.ravel(), reductions.ravel()])

    def _best(self, rows: Sequence[FloatArray]) -> FloatArray:
        """Shares of corners in every window whose least time over some plans is largest."""
        import highspy

        windows, count, axes = self._last + 1, len(self._corners), self._axes
        shares = np.arange(windows * count).reshape(windows, count)
        gathers, reductions = shares.size + np.arange(2 * axes * windows).reshape(2, axes, windows)
        total = shares.size + 2 * axes * windows
        program = highspy.Highs()
        program.setOptionValue("output_flag", False)
        program.setOptionValue("threads", 1)
        for _ in range(total):
            program.addVar(0.0, 1.0)
        program.addVar(0.0, highspy.kHighsInf)
        program.changeColCost(total, -1.0)

        def row(low: float, columns: NDArray[np.int64], values: FloatArray, high: float = highspy.kHighsInf) -> None:
            program.addRow(low, high, len(columns), columns.astype(np.int32), values)

        for window in range(windows):
            row(1.0, shares[window], np.ones(count), 1.0)
            for axis in range(axes):
                part = np.array([corner.transfers[axis] / WHOLE for corner in self._corners])
                # What is gathered by a window may be carried in any window before, what it reduces in any behind.
                for weight, next_to in ((gathers[axis], window - 1), (reductions[axis], window + 1)):
                    row(0.0, np.append(shares[window], weight[window]), np.append(part, -1.0))
                    if 0 <= next_to < windows:
                        row(0.0, np.array([weight[next_to], weight[window]]), np.array([1.0, -1.0]))
        largest = max(1.0, *(float(times.max()) for times in rows))
        for times in rows:
            row(0.0, np.arange(total + 1), np.append(times / largest, -1.0))
        program.run()
        found = np.array(program.getSolution().col_value[: shares.size]).reshape(windows, count)
        found = np.clip(found, 0.0, None)
        return np.asarray(found / found.sum(axis=1, keepdims=True), dtype=np.float64)


def transfers_at(model: StepModel, axes: int, share: float) -> StepWeights:
    """Weights of the costs without overlap, but for a share of the time on links in place of each transfer's."""
    count = len(model.nodes)
    every, none = np.full(count, SCALE, dtype=np.int64), np.zeros((axes, count), dtype=np.int64)
    links = np.full((axes, count), round(share * SCALE), dtype=np.int64)
    return StepWeights(SCALE, every, every, none, links, links, SCALE)
