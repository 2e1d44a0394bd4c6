"""Memory prices where few limits bind: found on a tied problem, and carried over to the whole one.

Blocks that repeat see nearly the same prices, since mostly what binds is one moment at which everything kept is alive.
So the prices of a problem whose inner blocks are tied (:mod:`formulations.solvers.columns.tied_problem`) are nearly
those of the whole problem, at a small part of the effort. So are its messages, each a sum over the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, message_entries
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.columns.repeated_blocks import Repeats
from formulations.solvers.columns.tunables import FRESH_ROWS
from formulations.solvers.local_search.moves import usage_of
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.raised_prices import block_peaks
from formulations.solvers.prices.tunables import FIRST_PAIRS, NEGLIGIBLE, PAIRS, PATIENCE, SHORT_ASCENT


class FewRowsAscent(PriceAscent):
    """Price steps on the rows that have a price and the few that the decoded assignment violates most."""

    def climb(self, deadline: float, most_steps: int = SHORT_ASCENT) -> None:
        """Raise the bound from the present prices until it stalls, or to ``deadline`` (of :func:`time.monotonic`)."""
        self.sweeps(FIRST_PAIRS)
        bounds: list[float] = []
        for done in range(most_steps):
            if time.monotonic() > deadline:
                return
            self.step(done / most_steps, 2 * PAIRS)  # the tied problem is small: more sweeps are cheap here
            bounds.append(self.best_bound)
            if done > PATIENCE and bounds[-1] - bounds[-PATIENCE] <= NEGLIGIBLE * abs(bounds[-1]):
                return

    def settle(self, deadline: float, is_enough: Callable[[float], bool], most_pairs: int) -> None:
        """Sweep at the present prices until the bound is enough or stands still, or to ``deadline``."""
        before = -np.inf
        for _ in range(0, most_pairs, PAIRS):
            bound = self.sweeps(PAIRS)
            if is_enough(bound) or bound - before <= NEGLIGIBLE * abs(bound) or time.monotonic() > deadline:
                return
            before = bound

    def _candidate_rows(self, temperature: float) -> IntArray:
        usage = self.flat.usage
        load = usage_of(self.flat.graph, usage, self.choices) / np.maximum(usage.limit, 1.0)
        peaks = block_peaks(load)
        fresh = peaks[(load[peaks] > 1.0) & (self.prices[peaks] == 0.0)]
        fresh = fresh[np.argsort(-load[fresh])[:FRESH_ROWS]]
        return np.union1d(np.flatnonzero(self.prices > 0), fresh).astype(np.int64)


def inner_groups(repeats: Repeats) -> IntArray:
    """Number groups of nodes: every second inner block of a family decides alike, its first and last for themselves.

    With two groups in turn, a factor within a block and one between neighbouring blocks never join the same groups, so
    that the messages of both are known.
    """
    ends = {
        family: (int(positions.min()), int(positions.max()))
        for family in range(int(repeats.family.max(initial=-1)) + 1)
        for positions in [repeats.position[repeats.family == family]]
    }
    known: dict[tuple[int, int, int], int] = {}
    groups: IntArray = np.zeros(len(repeats.orbit), dtype=np.int64)
    patterns = (repeats.family.tolist(), repeats.orbit.tolist(), repeats.position.tolist())
    for i, (family, orbit, position) in enumerate(zip(*patterns, strict=True)):
        if orbit < 0:
            key = -1, i, 0
        else:
            first, last = ends[family]
            is_inner = first < position < last
            key = orbit, int(position > first) + int(position >= last), position % 2 if is_inner else 0
        groups[i] = known.setdefault(key, len(known))
    return groups


def carry_over(coarse: FlatProblem, prices: FloatArray, fine: FlatProblem) -> FloatArray:
    """Return prices of the rows of ``fine`` from those of ``coarse``, whose times are the same.

    A row that the fine problem lacks hands its price to the row before it, or to the first.
    """
    result: FloatArray = np.zeros(len(fine.rows.time))
    for row in np.flatnonzero(prices > 0).tolist():
        resource = int(coarse.rows.resource[row])
        own = np.flatnonzero(fine.rows.resource == resource)
        if len(own):
            place = int(np.searchsorted(fine.rows.time[own], coarse.rows.time[row], side="right")) - 1
            change = fine.rows.quantum[resource] / coarse.rows.quantum[resource]
            result[own[max(0, place)]] += prices[row] * change
    return result


def carry_messages_over(coarse: FlatProblem, messages: FloatArray, fine: FlatProblem, group: IntArray) -> FloatArray:
    """Return messages of the factors of ``fine`` from those of ``coarse``, in which nodes decide in groups.

    A factor of ``coarse`` stands for all factors between its groups, each of which gets the same part of its messages.
    Whatever they are, messages are a valid start.

    Parameters
    ----------
    group
        Node of ``coarse`` for every node of ``fine``, shape ``(nodes,)``.
    """
    groups = group.tolist()
    place = {own.scope: f for f, own in enumerate(coarse.groups)}
    found = [place.get(tuple(sorted(groups[i] for i in own.scope)), -1) for own in fine.groups]
    shared = np.bincount([f for f in found if f >= 0], minlength=len(place))
    result: FloatArray = np.zeros(message_entries(fine.graph))
    for f, (own, c) in enumerate(zip(fine.groups, found, strict=True)):
        if c < 0:
            continue
        for axis, i in enumerate(own.scope):
            known, wanted = coarse.supported[groups[i]], fine.supported[i]
            first = coarse.graph.message_start[c, coarse.groups[c].scope.index(groups[i])]
            at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            values = np.where(known[at] == wanted, messages[first + at], 0.0)
            start = fine.graph.message_start[f, axis]
            result[start : start + len(wanted)] = values / shared[c]
    return result
