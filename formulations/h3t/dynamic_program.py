"""H3T's dynamic program over memory in units (Algorithm 3), and the one with both prunings (Algorithm 4).

A state behind layer ``i`` is what lower layers hold (``cur``), the peak so far, and what the next layer has to know of
layers ``i`` and ``i + 1``: their sets of switches in Algorithm 3, in Algorithm 4 only the three switches that are
handed over. The first is the second without the sweep that drops states which are no better in anything, and with every
set in a class of its own; so both are one recursion here. Bytes become units of the limit divided by ``m``; the
sequence found is simulated again in bytes, and may turn out not to fit.

Segments synchronize. What a layer needs is one term for both of its segments (:class:`LayerTables`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from formulations.h3t.operations import Switch
from formulations.h3t.problem import H3tError, Outcome
from formulations.h3t.segments import HANDED_OVER_SETS, SYNCHRONIZED_SETS, SegmentTables, handed_over, lazy
from formulations.h3t.slips import REPAIRED, Rounding, Slip
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray

__all__ = ["UNITS", "DpResult", "search_dp"]

UNITS = 128
"""The paper's m."""

_NEVER = 2**62
_MOST_ENTRIES = 2 * 10**7
"""Entries of one layer's table, 24 bytes each."""


@dataclass(frozen=True, slots=True)
class DpResult:
    """What the dynamic program found.

    Parameters
    ----------
    sequence
        Sets of switches with synchronization, or None where nothing fits in units.
    outcome
        Their simulated cost and peak, or None.
    states
        States that were kept, over all layers.
    """

    sequence: tuple[int, ...] | None
    outcome: Outcome | None
    states: int


def search_dp(
    tables: SegmentTables,
    memory_limit: int,
    *,
    pruned: bool = True,
    units: int = UNITS,
    rounding: Rounding = Rounding.NEAREST,
    slips: Slip = REPAIRED,
) -> DpResult:
    """Run Algorithm 4, or Algorithm 3 if not `pruned`.

    Raises
    ------
    H3tError
        If there are no units, or a table would be too large: Algorithm 3 is for few units.
    """
    classes = handed_over(np.arange(SYNCHRONIZED_SETS)) if pruned else np.arange(SYNCHRONIZED_SETS)
    count = HANDED_OVER_SETS if pruned else SYNCHRONIZED_SETS
    if units < 1:
        raise H3tError(f"units is {units}; divide the limit into at least one")
    if (count * (units + 1)) ** 2 > _MOST_ENTRIES:
        most = int(_MOST_ENTRIES**0.5) // count - 1
        raise H3tError(f"units is {units}; a table of all states has no room, use at most {most}, or the pruned search")
    by_layer = tables.by_layer()
    room = memory_limit - tables.fixed_bytes
    if room < 0:
        return DpResult(None, None, 0)
    of_class = np.array([np.flatnonzero(classes == c) for c in range(count)])
    members = (of_class, handed_over(of_class[:, 0]), lazy(of_class[:, 0]))
    states = np.array([[0, 0, 0, c, 0] for c in range(count)], dtype=np.int64)
    history = []
    for layer in range(tables.layers):
        rounded = [
            _in_units(each[layer], room, units, rounding) for each in (by_layer.peak, by_layer.kept, by_layer.resident)
        ]
        last = layer + 1 == tables.layers
        followers = np.arange(count if not last or Slip.LAST_LAYER_LOOP in slips else 1)
        best, links = _extend(
            states,
            by_layer.time[layer],
            rounded[0],
            rounded[1],
            rounded[2],
            members,
            (np.zeros_like(followers), np.zeros_like(followers)) if last else (followers, members[2]),
            units - (Slip.LIMIT_STRICT in slips),
        )
        kept = _sweep(best, Slip.PRUNE_BOUNDS in slips) if pruned else best < _NEVER
        places = np.argwhere(kept)
        states = np.column_stack([places[:, 2], places[:, 3], places[:, 0], places[:, 1], best[kept]])
        history.append(links[kept])
    kept_states = sum(map(len, history))
    if not len(states):
        return DpResult(None, None, kept_states)
    index = int(states[:, 4].argmin())
    sequence = _followed(history, index)
    outcome = tables.outcome(sequence)
    with_sync = tuple(s | int(Switch.SEGMENT_SYNC) for s in sequence)
    return DpResult(with_sync, outcome, kept_states)


def _in_units(amounts: IntArray, limit: int, units: int, rounding: Rounding) -> IntArray:
    """Bytes in units of ``limit / units``; more units than there are stand for everything that does not fit."""
    if not limit:
        return np.where(amounts > 0, units + 1, 0)
    below = np.minimum(amounts, 2 * limit + 2).astype(object) * units
    shift = {Rounding.DOWN: 0, Rounding.NEAREST: limit // 2, Rounding.UP: limit - 1}[rounding]
    found: IntArray = ((below + shift) // limit).astype(np.int64)
    return np.minimum(found, units + 1)


def _followed(history: list[IntArray], index: int) -> tuple[int, ...]:
    """Sets of switches that lead to one of the last states, the first layer first."""
    sequence = []
    for links in reversed(history):
        index, choice = (int(each) for each in links[index])
        sequence.append(choice)
    return tuple(reversed(sequence))


@compiled
def _extend(
    states: IntArray,
    time: IntArray,
    peak: IntArray,
    kept: IntArray,
    resident: IntArray,
    members: tuple[IntArray, IntArray, IntArray],
    followers: tuple[IntArray, IntArray],
    limit: int,
) -> tuple[IntArray, IntArray]:
    """Give one more layer every set of its class, and the layer behind it every class.

    Parameters
    ----------
    states
        Units held, peak in units, class of the layer before, class of this one, and time, shape ``(n, 5)``.
    time, peak, kept, resident
        Of the layer; memory in units.
    members
        Sets of every class, shape ``(classes, k)``, and what a class hands over and whether it is lazy.
    followers
        Classes of the layer behind, and whether these are lazy.
    limit
        Largest peak in units.

    Returns
    -------
    best, links
        Least time of every new state, shape ``(classes, classes, units + 1, units + 1)`` by class of this layer and of
        the next, units held and peak; and the state and the set it comes from.
    """
    of_class, hands_over, _ = members
    classes = len(of_class)
    size = limit + 1
    best: IntArray = np.full((classes, classes, size, size), 2**62, dtype=np.int64)
    links: IntArray = np.empty((classes, classes, size, size, 2), dtype=np.int64)
    for n in range(len(states)):
        held, highest, before, own, spent = states[n]
        for s in of_class[own]:
            for k in range(len(followers[0])):
                after = followers[0][k]
                below, above = hands_over[before], followers[1][k]
                new_held = held + resident[s] + kept[s]
                new_peak = max(highest, held + peak[below, s, above]) + resident[s]
                if new_peak > limit:
                    continue
                total = spent + time[below, s, above]
                if total < best[own, after, new_held, new_peak]:
                    best[own, after, new_held, new_peak] = total
                    links[own, after, new_held, new_peak, 0] = n
                    links[own, after, new_held, new_peak, 1] = s
    return best, links


@compiled
def _sweep(best: IntArray, wraps: bool) -> BoolArray:
    """Which states are faster than all that have no more of either memory (lines 27 to 42 of Algorithm 4)."""
    classes, _, size, _ = best.shape
    kept: BoolArray = np.zeros(best.shape, dtype=np.bool_)
    least = best.copy()
    for own in range(classes):
        for after in range(classes):
            table = least[own, after]
            for held in range(size):
                for peak in range(held, size):
                    fewer = table[held - 1, peak] if held > 0 or wraps else 2**62
                    lower = table[held, peak - 1] if peak > held or wraps else 2**62
                    if table[held, peak] < min(fewer, lower):
                        kept[own, after, held, peak] = True
                    else:
                        table[held, peak] = min(fewer, lower)
    return kept
