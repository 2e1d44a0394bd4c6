"""Values that wait for reruns: KIWI's equations (10) and (11), for any moment of the reruns.

An output that is read by an operator which runs again is held until the last such rerun has read it. Where
one operator may do so, that is usage of the pair (producer, reader), for every copy of the output until the next
one is made. With several it is a maximum, so a *hold node* chooses until when the last copy is held: usage of the
pair (producer, hold), and (hold, reader that runs again later) forbidden.

Up to its last direct use a copy is alive anyway. Where that last direct reader takes a resharded copy, the
value's own bytes are not needed while the reader computes, unless it is held for later: that depends on three
decisions (:class:`formulations.models.counting.Counting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, zip_longest
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
    moments
        When it may run again, shape ``(moments,)``.
    runs
        Whether it does, per mode and moment, shape ``(modes, moments)``.
    copied, direct
        Until when a rerun at each moment needs the value, where the reader takes a resharded copy of it, and where
        it reads the storage itself.
    aliases
        Layouts under which it reads the storage itself, shape ``(S_producer, S_reader)``.
    """

    node: int
    moments: IntArray
    runs: BoolArray
    copied: IntArray
    direct: IntArray
    aliases: BoolArray

    def last_need(self, ends: IntArray, copy: _Copy) -> IntArray:
        """The latest of these ends among the reruns that read a copy, per mode of the reader; 0 where none does."""
        read = self.runs & (self.moments >= copy.first) & (self.moments < copy.replaced)
        latest: IntArray = np.where(read, ends, 0).max(axis=1, initial=0)
        return latest


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy of the value, in one mode of its producer.

    Parameters
    ----------
    mode
        The mode.
    first, replaced
        It is read by reruns of moments from ``first`` on, until a rerun of its producer at ``replaced`` makes the next.
    until
        End of its life without holds.
    last
        Its last direct use.
    """

    mode: int
    first: int
    replaced: int
    until: int
    last: LastUse | None


_NO_COPY = _Copy(mode=0, first=0, replaced=0, until=0, last=None)
"""Stands in for a copy that a mode does not make: nobody reads it."""


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
        self.copies = [self._copies(mode) for mode in range(builder.modes(u))]
        earliest = min(copy.until for copies in self.copies for copy in copies)
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

    def _copies(self, mode: int) -> list[_Copy]:
        """The copies that reruns may read in a mode of the producer, in order; the last one comes last."""
        builder, end = self.builder, len(self.builder.model.nodes)
        life = builder.lifetimes[self.u, self.output]
        reruns = builder.reruns.get(self.u, ())
        if mode > len(reruns):
            last = builder.further_lives(self.u, self.output)[mode - len(reruns) - 1]
            return [_Copy(mode, 0, end, 0 if last is None else last.computed_end, last)]
        if mode == 0:
            assert life.last is not None, "an output with recomputable readers is read"
            return [_Copy(mode, 0, end, life.last.computed_end, life.last)]
        moments = reruns[mode - 1]
        made = [builder.timeline.last_time(builder.timeline.recompute[self.u][moment]) + 1 for moment in moments]
        again = [
            _Copy(mode, first, replaced, time, None)
            for (first, replaced), time in zip(pairwise((*moments, end)), made, strict=True)
        ]
        if life.backward is not None:
            again[-1] = replace(again[-1], until=max(life.backward.computed_end, made[-1]), last=life.backward)
        if self.u not in builder.rereads:
            return again[-1:]
        assert life.forward is not None, "what a rerun reads is read in forward"
        return [_Copy(mode, 0, moments[0], life.forward.computed_end, life.forward), *again]

    def _reader(self, v: int, edges: list[StepEdge]) -> _Reader:
        builder, slot = self.builder, max(edge.slot for edge in edges)
        moments = builder.moments[v]
        copied, direct = zip(*(self._needed_until(v, slot, moment) for moment in moments), strict=True)
        runs = np.zeros((builder.modes(v), len(moments)), dtype=np.bool_)
        for k, moment in enumerate(moments):
            runs[builder.modes_with(v, moment), k] = True
        aliases = np.logical_or.reduce([edge.copy_bytes == 0 for edge in edges])
        return _Reader(v, np.array(moments), runs, np.array(copied), np.array(direct), aliases)

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
        """Hold every copy as usage of the pair (producer, reader)."""
        builder = self.builder
        aliases = builder.over_modes(reader.aliases, self.u, reader.node)
        sizes = reader.aliases.shape
        held = []
        for copies in zip_longest(*self.copies, fillvalue=_NO_COPY):
            start = np.array([[copy.until] for copy in copies], dtype=np.int64)
            copied = np.stack([reader.last_need(reader.copied, copy) for copy in copies])
            direct = np.stack([reader.last_need(reader.direct, copy) for copy in copies])
            ends = np.where(aliases, _widened(direct, *sizes), _widened(copied, *sizes))
            held.append((_widened(start, sizes[0], 1), ends))
        builder.pair_usage((self.u, reader.node), self._between(held))
        if builder.counting is not Counting.EXACT:
            return
        for copy in chain.from_iterable(self.copies):
            later = np.repeat(reader.last_need(reader.copied, copy) > copy.until, sizes[1])
            self._through_last_use(copy, reader.node, later)

    # --------------------------------------------------------- several readers

    def _hold_by_node(self) -> None:
        """Hold the last copy until a time that a node of its own chooses."""
        builder = self.builder
        assert self.u not in builder.rereads, "what runs again twice is read by one operator that may run again"
        last = [copies[-1] for copies in self.copies]
        exact = builder.counting is Counting.EXACT
        ends = {0}
        for reader in self.readers:
            if not reader.aliases.all():
                ends.update(reader.copied.tolist())
            if reader.aliases.all() or (exact and reader.aliases.any()):
                ends.update(reader.direct.tolist())
        until = np.array(sorted(ends), dtype=np.int64)
        hold = builder.new_node(f"{builder.names[self.u]} held", until.shape[0])
        start = np.array([[copy.until] for copy in last], dtype=np.int64)
        builder.pair_usage((self.u, hold), self._between([(_widened(start, self.bytes.size, 1), until[None, :])]))
        for reader in self.readers:
            self._forbid_too_early(hold, until, reader)
        if exact:
            for copy in last:
                self._through_last_use(copy, hold, until > copy.until)

    def _forbid_too_early(self, hold: int, until: IntArray, reader: _Reader) -> None:
        """Forbid holds that end before a rerun of the reader has the value."""
        builder, size = self.builder, reader.aliases.shape[1]
        copied, direct = (np.where(reader.runs, ends, 0).max(axis=1) for ends in (reader.copied, reader.direct))
        needed = direct if reader.aliases.all() else copied
        early = np.repeat(until[:, None] < needed[None, :], size, axis=1)
        builder.factor((hold, reader.node), np.zeros(early.shape, dtype=np.int64), early)
        if builder.counting is not Counting.EXACT or reader.aliases.all() or not reader.aliases.any():
            return
        aliases = builder.over_modes(reader.aliases, self.u, reader.node)
        early = np.repeat(until[:, None] < direct[None, :], size, axis=1)
        both = aliases[:, None, :] & early[None, :, :]
        builder.factor((self.u, hold, reader.node), np.zeros(both.shape, dtype=np.int64), both)

    # ------------------------------------------------------------------ tables

    def _between(self, held: list[tuple[IntArray, IntArray]]) -> list[UsageTerm]:
        """Usage of the value's bytes where it is held from a start to an end, tables that broadcast to one shape."""
        spans = [np.broadcast_arrays(start, end) for start, end in held]
        amount = np.tile(self.bytes, self.builder.modes(self.u))[:, None]
        points = np.unique(np.concatenate([ends[start < end] for start, end in spans for ends in (start, end)]))
        found: list[UsageTerm] = []
        for since, until in pairwise(points.tolist()):
            alive = np.logical_or.reduce([(start <= since) & (end >= until) for start, end in spans])
            found += self.builder.term(since, until, amount * alive)
        return found

    def _through_last_use(self, copy: _Copy, other: int, later: BoolArray) -> None:
        """Count a copy while its last direct reader computes on a resharded one, where it is held for later.

        ``later`` says for every strategy of the node ``other`` whether it holds the copy beyond that use.
        """
        builder, last = self.builder, copy.last
        if last is None or last.aliases is None or last.end == last.computed_end or not later.any():
            return
        if (self.u, self.output) in builder.lives_on:
            return  # counted in any case
        amount = builder.in_mode(self.u, copy.mode, self.bytes)
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


def _widened(table: IntArray, rows: int, columns: int) -> IntArray:
    """A table over modes, repeated over the layouts of both nodes."""
    return np.repeat(np.repeat(table, rows, axis=0), columns, axis=1)
