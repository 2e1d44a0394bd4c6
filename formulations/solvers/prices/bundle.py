r"""Memory prices by a proximal bundle method, where the priced problem can be minimised exactly.

The dual function :math:`g(\lambda) = \min_x cost(x) + \lambda^T (usage(x) - limit)` is concave and every
minimiser gives a cut :math:`g(\lambda_k) + s_k^T (\lambda - \lambda_k) \ge g(\lambda)`. A step maximises the least cut
minus :math:`\|\lambda - \bar\lambda\|^2 / 2t` (Lemarechal, Nemirovskii and Nesterov 1995; Kiwiel 1990). On graphs
of small width this exceeds the bound of message passing, and every minimiser is a start for the incumbent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from formulations.encodings.elimination import TooWideError, elimination_order, minimise_floats
from formulations.encodings.flat import FlatProblem, FloatArray
from formulations.encodings.priced_costs import PricedCosts
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.moves import usage_of
from formulations.solvers.prices.raised_prices import block_peaks
from formulations.solvers.prices.tunables import BUNDLE_CUTS, BUNDLE_SERIOUS_SHARE, NEGLIGIBLE, PATIENCE


@dataclass(slots=True, eq=False)
class _Cut:
    """Value of a cut at price zero, and its slope per unit of scaled price."""

    at_zero: float
    slope: FloatArray


class PriceBundle:
    """A bundle of cuts around a centre of prices.

    Parameters
    ----------
    flat
        Without contradiction.
    prices
        Where to start, per unit of flat usage.
    most_change
        Length of the first step, in cost (price times limit).
    most_entries
        Largest number of table entries that one minimisation may fill.
    deadline
        Of :func:`time.monotonic`.

    Raises
    ------
    TooWideError
        If the graph is too wide to minimise exactly.
    OutOfTimeError
        At the deadline, here and in :meth:`improve`.

    Attributes
    ----------
    prices, bound, choices
        The centre, its (floating-point) bound, and the minimiser there.
    """

    def __init__(
        self, flat: FlatProblem, prices: FloatArray, most_change: float, most_entries: int, deadline: float
    ) -> None:
        self.flat = flat
        self._deadline = deadline
        self._sizes = flat.graph.sizes.tolist()
        self._scopes = [group.scope for group in flat.groups]
        self._order, _, entries = elimination_order(self._sizes, self._scopes)
        if entries > most_entries:
            raise TooWideError(f"one minimisation fills {entries} entries, at most {most_entries} are wanted")
        self._scale = np.maximum(flat.usage.limit, 1.0)
        self._capacity = flat.usage.limit / self._scale
        self._costs = PricedCosts(flat)
        self._active = np.zeros(len(prices), dtype=np.bool_)
        self._cuts: list[_Cut] = []
        self._centre = np.maximum(prices, 0.0) * self._scale
        self.bound, self.choices = self._evaluate(self._centre)
        self._step = most_change / max(float(np.linalg.norm(self._cuts[0].slope[self._active])), 1e-9)
        self._patience = PATIENCE

    @property
    def prices(self) -> FloatArray:
        """Prices per unit of flat usage at the centre."""
        return self._centre / self._scale

    def improve(self) -> bool:
        """Try one step; return whether the bundle can still expect to raise the bound."""
        if not any(cut.slope[self._active].any() for cut in self._cuts):
            return False
        target, expected = self._model_maximiser()
        gain = expected - self.bound
        if gain <= NEGLIGIBLE * abs(self.bound):
            # Either the top is near, or steps are too short to show it.
            self._step *= 10.0
            self._patience -= 1
            return self._patience > 0
        self._patience = PATIENCE
        value, choices = self._evaluate(target)
        if value >= self.bound + BUNDLE_SERIOUS_SHARE * gain:
            self._centre, self.bound, self.choices = target, value, choices
            self._step *= 1.5
        else:
            self._step *= 0.85
        return True

    def _evaluate(self, scaled: FloatArray) -> tuple[float, IntArray]:
        """Minimise at prices; add the cut."""
        flat, graph = self.flat, self.flat.graph
        self._costs.set(scaled / self._scale)
        tables: list[tuple[tuple[int, ...], FloatArray]]
        tables = [((i,), self._costs.unary[graph.offset[i] : graph.offset[i + 1]]) for i in range(len(self._sizes))]
        for f, scope in enumerate(self._scopes):
            table = self._costs.tables[graph.table_start[f] : graph.table_start[f] + graph.table_size[f]]
            tables.append((scope, table.reshape([self._sizes[i] for i in scope])))
        least, found = minimise_floats(self._sizes, self._order, tables, self._deadline)
        choices = np.array(found, dtype=np.int64)
        slope = usage_of(graph, flat.usage, choices) / self._scale - self._capacity
        value = least - float(scaled @ self._capacity)
        peaks = block_peaks(slope)
        self._active[peaks[slope[peaks] > 0]] = True
        self._active |= scaled > 0
        self._cuts.append(_Cut(value - float(slope @ scaled), slope))
        if len(self._cuts) > BUNDLE_CUTS:
            heights = [cut.at_zero + float(cut.slope @ self._centre) for cut in self._cuts[:-1]]
            del self._cuts[int(np.argmax(heights))]
        return value, choices

    def _model_maximiser(self) -> tuple[FloatArray, float]:
        """Maximise the least cut minus the proximal term over active rows, in its dual (a simplex), by FISTA."""
        rows = np.flatnonzero(self._active)
        slopes = np.array([cut.slope[rows] for cut in self._cuts])
        at_zero = np.array([cut.at_zero for cut in self._cuts])
        centre = self._centre[rows]
        curvature = self._step * max(float(np.linalg.norm(slopes @ slopes.T, 2)), 1e-300)
        weights = np.full(len(at_zero), 1.0 / len(at_zero))
        ahead, momentum = weights.copy(), 1.0
        best, best_expected = centre, -np.inf
        best_merit = -np.inf
        for _ in range(300):
            trial = np.maximum(0.0, centre + self._step * (ahead @ slopes))
            heights = at_zero + slopes @ trial
            expected = float(heights.min())
            merit = expected - float(((trial - centre) ** 2).sum()) / (2.0 * self._step)
            if merit > best_merit:
                best, best_expected, best_merit = trial, expected, merit
            if abs(float(ahead @ heights) - expected) <= 0.01 * (expected - self.bound):
                break
            following = _onto_simplex(ahead - (heights - heights.min()) / curvature)
            faster = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
            ahead = following + (momentum - 1.0) / faster * (following - weights)
            weights, momentum = following, faster
        target = np.zeros_like(self._centre)
        target[rows] = best
        return target, best_expected


def _onto_simplex(point: FloatArray) -> FloatArray:
    """Project onto the probability simplex (Held, Wolfe and Crowder 1974)."""
    ordered = np.sort(point)[::-1]
    excess = np.cumsum(ordered) - 1.0
    count = int(np.flatnonzero(ordered > excess / np.arange(1, len(point) + 1))[-1]) + 1
    result: FloatArray = np.maximum(point - excess[count - 1] / count, 0.0)
    return result
