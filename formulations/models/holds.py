"""Values that wait for reruns: KIWI's equations (10) and (11), for any moment of the reruns.

An output that is read by an operator which runs again is held until the last such rerun has read it. Where
one operator may do so, that is usage of the pair (producer, reader). With several it is a maximum, so a *hold
node* chooses until when the value is held: usage of the pair (producer, hold), and (hold, reader that runs
again later) forbidden.

Up to its last direct use a value is alive anyway. Where that last direct reader takes a resharded copy, the
value's own bytes are not needed while the reader computes, unless it is held for later: that depends on three
decisions (:class:`formulations.models.counting.Counting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from formulations.models.counting import Counting
from formulations.models.liveness import LastUse
from formulations.models.step import NodeKind, StepEdge
from formulations.problem import BoolArray, Factor, IntArray, StrategyProblem, UsageTerm

if TYPE_CHECKING:
    from formulations.models.recompute import RecomputeProblemBuilder


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    """An operator that may run again and then reads the value.

    Parameters
    ----------
    node
        The operator.
    copied, direct
        Per mode of the reader (0: it does not run again), until when the value is needed where the reader takes
        a copy of it, and where it reads the storage itself. Shape ``(modes,)``.
    aliases
        Layouts under which it reads the storage itself, shape ``(S_producer, S_reader)``.
    """

    node: int
    copied: IntArray
    direct: IntArray
    aliases: BoolArray


@dataclass(frozen=True, slots=True)
class _OwnLife:
    """Until when the value is alive without holds, in one mode of its producer."""

    mode: int
    until: int
    last: LastUse | None


def add_holds(builder: RecomputeProblemBuilder) -> None:
    """Add to a problem how long inputs wait for reruns of their readers."""
    for u, node in enumerate(builder.model.nodes):
        if node.kind is not NodeKind.FORWARD:
            continue
        edges: dict[int, dict[int, list[StepEdge]]] = {}
        for edge in builder.model.edges_from[u]:
            if edge.consumer in builder.reruns:
                edges.setdefault(edge.output, {}).setdefault(edge.consumer, []).append(edge)
        for output, by_reader in sorted(edges.items()):
            _HeldOutput(builder, u, output, by_reader).add()


def shortest_holds(problem: StrategyProblem, choices: Sequence[int]) -> tuple[int, ...]:
    """Complete choices of a step's nodes by the hold nodes, each as short as its readers allow.

    Parameters
    ----------
    problem
        A problem of a step; what follows the step's nodes are hold nodes.
    choices
        Strategies of the step's nodes.
    """
    count, complete = len(choices), list(choices)
    rules: dict[int, list[Factor]] = {hold: [] for hold in range(count, len(problem.nodes))}
    for factor in problem.factors:
        hold = max(factor.scope)
        if hold >= count and factor.forbidden is not None:
            rules[hold].append(factor)
    for hold, factors in rules.items():
        forbidden = np.zeros(problem.nodes[hold].size, dtype=np.bool_)
        for factor in factors:
            assert factor.forbidden is not None
            place = tuple(slice(None) if i == hold else complete[i] for i in factor.scope)
            forbidden |= factor.forbidden[place]
        complete.append(int(np.argmin(forbidden)))
    return tuple(complete)


class _HeldOutput:
    """One output of one producer and the operators that may read it again."""

    def __init__(
        self, builder: RecomputeProblemBuilder, u: int, output: int, by_reader: dict[int, list[StepEdge]]
    ) -> None:
        self.builder = builder
        self.u = u
        self.output = output
        self.bytes = builder.model.nodes[u].output_bytes[:, output]
        self.lives = self._own_lives()
        earliest = min(life.until for life in self.lives)
        readers = [self._reader(v, edges) for v, edges in sorted(by_reader.items())]
        self.readers = [reader for reader in readers if int(reader.direct.max()) > earliest]

    def add(self) -> None:
        """Add the usage and, for several readers, the hold node."""
        if not self.readers:
            return
        counting = self.builder.counting
        if counting is Counting.OVER or (counting is Counting.EXACT and self._is_result()):
            self.builder.lives_on.add((self.u, self.output))
        if len(self.readers) == 1:
            self._hold_for(self.readers[0])
        else:
            self._hold_by_node()

    def _is_result(self) -> bool:
        """Whether the value is also a result of the step: then its own life is not counted to the byte."""
        return any((edge.producer, edge.output) == (self.u, self.output) for edge in self.builder.model.results)

    # ------------------------------------------------------------ what is known

    def _own_lives(self) -> list[_OwnLife]:
        """Life of the version that reruns read, per mode."""
        builder, timeline = self.builder, self.builder.timeline
        life = builder.lifetimes[self.u, self.output]
        assert life.last is not None, "an output with recomputable readers is read"
        found = [_OwnLife(0, life.last.computed_end, life.last)]
        for mode, moment in enumerate(builder.reruns.get(self.u, ()), start=1):
            made = timeline.last_time(timeline.recompute[self.u][moment]) + 1
            if life.backward is not None:
                found.append(_OwnLife(mode, max(life.backward.computed_end, made), life.backward))
            else:
                found.append(_OwnLife(mode, made, None))
        for last in builder.further_lives(self.u, self.output):
            found.append(_OwnLife(len(found), 0 if last is None else last.computed_end, last))
        return found

    def _reader(self, v: int, edges: list[StepEdge]) -> _Reader:
        slot = max(edge.slot for edge in edges)
        ends = [self._needed_until(v, slot, moment) for moment in self.builder.reruns[v]]
        further = [(0, 0)] * self.builder.further_modes(v)
        copied, direct = zip((0, 0), *ends, *further, strict=True)
        aliases = np.logical_or.reduce([edge.copy_bytes == 0 for edge in edges])
        return _Reader(v, np.array(copied, dtype=np.int64), np.array(direct, dtype=np.int64), aliases)

    def _needed_until(self, v: int, slot: int, moment: int) -> tuple[int, int]:
        """Until when a rerun needs the value, as a copy and directly."""
        timeline = self.builder.timeline
        event = timeline.recompute[v][moment]
        computed = timeline.last_time(event) + 1
        if self.builder.counting is Counting.OVER:
            return computed, computed
        return timeline.argument_time(event, slot) + 1, computed

    # -------------------------------------------------------------- one reader

    def _hold_for(self, reader: _Reader) -> None:
        """Hold the value as usage of the pair (producer, reader)."""
        builder = self.builder
        aliases = builder.over_modes(reader.aliases, self.u, reader.node)
        size = reader.aliases.shape[1]
        ends = np.where(aliases, np.repeat(reader.direct, size), np.repeat(reader.copied, size))
        builder.pair_usage((self.u, reader.node), self._between(self._own_ends()[:, None], ends))
        if builder.counting is not Counting.EXACT:
            return
        for life in self.lives:
            later = np.repeat(reader.copied > life.until, size)
            self._through_last_use(life, reader.node, later)

    # --------------------------------------------------------- several readers

    def _hold_by_node(self) -> None:
        """Hold the value until a time that a node of its own chooses."""
        builder = self.builder
        exact = builder.counting is Counting.EXACT
        ends = {0}
        for reader in self.readers:
            if not reader.aliases.all():
                ends.update(reader.copied.tolist())
            if reader.aliases.all() or (exact and reader.aliases.any()):
                ends.update(reader.direct.tolist())
        until = np.array(sorted(ends), dtype=np.int64)
        hold = builder.new_node(f"{builder.names[self.u]} held", until.shape[0])
        builder.pair_usage((self.u, hold), self._between(self._own_ends()[:, None], until[None, :]))
        for reader in self.readers:
            self._forbid_too_early(hold, until, reader)
        if exact:
            for life in self.lives:
                self._through_last_use(life, hold, until > life.until)

    def _forbid_too_early(self, hold: int, until: IntArray, reader: _Reader) -> None:
        """Forbid holds that end before a rerun of the reader has the value."""
        builder, size = self.builder, reader.aliases.shape[1]
        needed = reader.direct if reader.aliases.all() else reader.copied
        early = np.repeat(until[:, None] < needed[None, :], size, axis=1)
        builder.factor((hold, reader.node), np.zeros(early.shape, dtype=np.int64), early)
        if builder.counting is not Counting.EXACT or reader.aliases.all() or not reader.aliases.any():
            return
        aliases = builder.over_modes(reader.aliases, self.u, reader.node)
        early = np.repeat(until[:, None] < reader.direct[None, :], size, axis=1)
        both = aliases[:, None, :] & early[None, :, :]
        builder.factor((self.u, hold, reader.node), np.zeros(both.shape, dtype=np.int64), both)

    # ------------------------------------------------------------------ tables

    def _own_ends(self) -> IntArray:
        """End of the own life per strategy of the producer."""
        return np.repeat(np.array([life.until for life in self.lives], dtype=np.int64), self.bytes.shape[0])

    def _between(self, start: IntArray, end: IntArray) -> list[UsageTerm]:
        """Usage of the value's bytes from ``start`` to ``end``, tables that broadcast to one shape."""
        start, end = np.broadcast_arrays(start, end)
        amount = np.tile(self.bytes, self.builder.modes(self.u))[:, None]
        points = np.unique(np.concatenate([start[start < end], end[start < end]])).tolist()
        found: list[UsageTerm] = []
        for since, until in pairwise(points):
            found += self.builder.term(since, until, amount * ((start <= since) & (end >= until)))
        return found

    def _through_last_use(self, life: _OwnLife, other: int, later: BoolArray) -> None:
        """Count the value while its last direct reader computes on a copy, where it is held for later.

        ``later`` says for every strategy of the node ``other`` whether it holds the value beyond that life.
        """
        builder, last = self.builder, life.last
        if last is None or last.aliases is None or last.end == last.computed_end or not later.any():
            return
        if (self.u, self.output) in builder.lives_on:
            return  # counted in any case
        amount = builder.in_mode(self.u, life.mode, self.bytes)
        copied = ~builder.over_modes(last.aliases, self.u, last.reader)
        if last.reader == other:
            held = amount[:, None] * (copied & later[None, :])
            builder.pair_usage((self.u, other), builder.term(last.end, last.computed_end, held))
            return
        held = amount[:, None, None] * (copied[:, :, None] & later[None, None, :])
        usage = builder.term(last.end, last.computed_end, held)
        if usage:
            scope = (self.u, last.reader, other)
            builder.factor(scope, np.zeros(held.shape, dtype=np.int64), usage=usage)
