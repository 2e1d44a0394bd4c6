"""The event simulator of H3T: when every operation of a run of segments starts and ends, and the most memory in use.

It reads the rules of :mod:`formulations.h3t.operations` as arrays. A run may be the whole step or one segment.
What happened before the run has ended at its beginning, what happens behind it begins at its end. So a segment on its
own is the same as in a step in which all segments around it synchronize.

Time is in integer quanta and memory in bytes. A tensor takes memory from the start of the operation that makes it to
the end of the last one that needs it, the end left out: what is freed at a moment makes room for what begins then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from formulations.h3t.operations import (
    BACKWARD_SEGMENT,
    FORWARD_SEGMENT,
    LIVES,
    After,
    Operation,
    Rule,
    SegmentRules,
    Stream,
    Switch,
)
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray

__all__ = ["simulate_runs"]

_FORWARD, _BACKWARD = 0, 1
_DIRECTIONS = (FORWARD_SEGMENT, BACKWARD_SEGMENT)
_STREAMS = len(Stream)
_SYNC = int(Switch.SEGMENT_SYNC)
_NOTHING = -1


class _RuleArrays(NamedTuple):
    """The rules as arrays.

    Parameters
    ----------
    issued
        Operation, offset, stream and switches of every rule, shape ``(rules, 4)``.
    after
        Pairs of operation and offset, shape ``(rules, k, 2)``, filled up with -1.
    orders
        Rules in the order of their issue by direction and whether it is economical, shape ``(2, 2, k)``, filled up
        with -1.
    economical
        The switch that says so, by direction.
    places
        Direction of the segment that issues an operation, and its rule's offset, shape ``(operations, 2)``.
    lives
        Tensor, first operation, offset, switches on and switches off, shape ``(lives, 5)``.
    ends
        As `after`, of every life.
    """

    issued: IntArray
    after: IntArray
    orders: IntArray
    economical: IntArray
    places: IntArray
    lives: IntArray
    ends: IntArray


def simulate_runs(
    durations: IntArray,
    sizes: IntArray,
    device_link: bool,
    sequences: IntArray,
    segments: tuple[int, int],
    layers: tuple[int, int],
) -> IntArray:
    """Time and memory of a run of segments for each of several sequences of switches.

    Parameters
    ----------
    durations
        Quanta of every operation, shape ``(operations, N + 2)``; layers 0 and ``N + 1`` are the borders. -1 where a
        layer has no such operation.
    sizes
        Bytes of every tensor, shape ``(tensors, N + 2)``.
    device_link
        Whether communication between devices has a stream of its own; else it takes turns with the host's.
    sequences
        Sets of switches, those of the borders included, shape ``(count, N + 2)``.
    segments
        First segment and the one behind the last: forward segment ``i`` is ``i``, backward segment ``i`` is
        ``2 * N + 2 - i``, so that the step is ``(0, 2 * N + 3)``.
    layers
        First layer whose tensors count, and the one behind the last.

    Returns
    -------
    numpy.ndarray
        Quanta and the most bytes of each sequence, shape ``(count, 2)``; resident shards are left out.
    """
    links = [stream if device_link or stream is not Stream.DEVICE else Stream.HOST for stream in Stream]
    return _simulate(durations, sizes, np.array(links, dtype=np.int64), sequences, segments, layers, _RULES)


def _rule_arrays() -> _RuleArrays:
    rules = [rule for side in _DIRECTIONS for rule in (*side.compute, *side.post, *side.prepare)]
    orders = [
        [[rules.index(rule) for rule in _in_order(side, economical)] for economical in (False, True)]
        for side in _DIRECTIONS
    ]
    places = np.zeros((len(Operation), 2), dtype=np.int64)
    for direction, side in enumerate(_DIRECTIONS):
        for rule in (*side.compute, *side.post, *side.prepare):
            places[rule.operation] = direction, rule.offset
    return _RuleArrays(
        issued=_integers([(rule.operation, rule.offset, rule.stream, rule.when) for rule in rules]),
        after=_padded_pairs([rule.after for rule in rules]),
        orders=_integers([[_padded(row, len(rules)) for row in side] for side in orders]),
        economical=_integers([side.economical for side in _DIRECTIONS]),
        places=places,
        lives=_integers([(life.tensor, *life.begin, life.on, life.off) for life in LIVES]),
        ends=_padded_pairs([life.ends for life in LIVES]),
    )


def _in_order(side: SegmentRules, economical: bool) -> tuple[Rule, ...]:
    first, second = (side.post, side.prepare) if economical else (side.prepare, side.post)
    return (*side.compute, *first, *second)


def _padded(row: Sequence[int], length: int) -> list[int]:
    return [*row, *[_NOTHING] * (length - len(row))]


def _padded_pairs(rows: Sequence[After]) -> IntArray:
    most = max(map(len, rows))
    return _integers([[*row, *[(_NOTHING, 0)] * (most - len(row))] for row in rows])


def _integers(values: object) -> IntArray:
    return np.array(values, dtype=np.int64)


_RULES = _rule_arrays()


@compiled
def _simulate(
    durations: IntArray,
    sizes: IntArray,
    links: IntArray,
    sequences: IntArray,
    segments: tuple[int, int],
    layers: tuple[int, int],
    rules: _RuleArrays,
) -> IntArray:
    count, width = sequences.shape
    found = np.empty((count, 2), dtype=np.int64)
    starts, ends = np.empty((2, len(durations), width), dtype=np.int64)
    events = np.empty((2 * len(rules.lives) * (layers[1] - layers[0]), 2), dtype=np.int64)
    for k in range(count):
        starts[:] = 0
        ends[:] = 0
        found[k, 0] = _time(durations, links, sequences[k], segments, rules, starts, ends)
        used = _events(sizes, sequences[k], segments, layers, found[k, 0], rules, starts, ends, events)
        found[k, 1] = _most(events[:used])
    return found


@compiled
def _time(
    durations: IntArray,
    links: IntArray,
    sequence: IntArray,
    segments: tuple[int, int],
    rules: _RuleArrays,
    starts: IntArray,
    ends: IntArray,
) -> int:
    """Fill in when operations start and end; return when the last one ends."""
    width = len(sequence)
    free = np.zeros(_STREAMS, dtype=np.int64)
    release = 0
    for position in range(segments[0], segments[1]):
        direction = _FORWARD if position < width - 1 else _BACKWARD
        segment = position if direction == _FORWARD else 2 * width - 2 - position
        economical = 1 if sequence[segment] & rules.economical[direction] else 0
        for rule in rules.orders[direction, economical]:
            if rule == _NOTHING:
                break
            operation, layer = rules.issued[rule, 0], segment + rules.issued[rule, 1]
            if layer < 0 or layer >= width or durations[operation, layer] < 0:
                continue
            when = rules.issued[rule, 3]
            if sequence[layer] & when != when:
                continue
            stream = links[rules.issued[rule, 2]]
            start = max(free[stream], release)
            for earlier, offset in rules.after[rule]:
                if earlier != _NOTHING and 0 <= layer + offset < width:
                    start = max(start, ends[earlier, layer + offset])
            starts[operation, layer] = start
            ends[operation, layer] = start + durations[operation, layer]
            free[stream] = ends[operation, layer]
        if sequence[segment] & _SYNC:
            release = free.max()
    return max(release, int(free.max()))


@compiled
def _events(
    sizes: IntArray,
    sequence: IntArray,
    segments: tuple[int, int],
    layers: tuple[int, int],
    total: int,
    rules: _RuleArrays,
    starts: IntArray,
    ends: IntArray,
    events: IntArray,
) -> int:
    """Fill in pairs of moment and change of memory; return how many there are."""
    width = len(sequence)
    used = 0
    for layer in range(layers[0], layers[1]):
        for life in range(len(rules.lives)):
            tensor, operation, offset, on, off = rules.lives[life]
            size = sizes[tensor, layer]
            if size == 0 or sequence[layer] & on != on or sequence[layer] & off:
                continue
            begin = _moment(starts, operation, layer + offset, width, segments, total, rules.places)
            end = 0
            for last, behind in rules.ends[life]:
                if last != _NOTHING:
                    end = max(end, _moment(ends, last, layer + behind, width, segments, total, rules.places))
            if end > begin:
                events[used] = begin, size
                events[used + 1] = end, -size
                used += 2
    return used


@compiled
def _moment(
    moments: IntArray, operation: int, layer: int, width: int, segments: tuple[int, int], total: int, places: IntArray
) -> int:
    """Moment of an operation, moved into the run."""
    direction, offset = places[operation]
    position = layer - offset if direction == _FORWARD else 2 * width - 2 - (layer - offset)
    if position < segments[0]:
        return 0
    return total if position >= segments[1] else moments[operation, layer]


@compiled
def _most(events: IntArray) -> int:
    """The most bytes at any moment."""
    order = np.argsort(events[:, 0])
    most = current = 0
    for k in range(len(order)):
        current += events[order[k], 1]
        if k + 1 == len(order) or events[order[k + 1], 0] > events[order[k], 0]:
            most = max(most, current)
    return most
