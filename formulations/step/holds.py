"""Values held for reruns: KIWI's equations (10) and (11), for any moment of the reruns.

An output that is read by an operator which runs again is held until the last such rerun has read it. Where only one
operator may run again and read it, that is usage of the pair (producer, reader), for every copy of the output until
the next one is made. With several readers it is a maximum, so a *hold node* chooses the end of the last copy's hold:
usage of the pair (producer, hold), and (hold, reader that runs again later) forbidden.

Up to its last direct use a copy is alive anyway. Where that last direct reader takes a resharded copy, the
value's own bytes are not needed while the reader computes, unless it is held for later: that depends on three
decisions (:class:`formulations.step.counting.Counting`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

import numpy as np

from formulations.problem.strategy_problem import BoolArray, Factor, IntArray, StrategyProblem, UsageTerm
from formulations.step.counting import Counting
from formulations.step.liveness import LastUse, read_directly
from formulations.step.training_step import NodeKind, StepEdge

if TYPE_CHECKING:
    from formulations.step.recompute import RecomputeProblemBuilder


@dataclass(frozen=True, slots=True, eq=False)
class _Reruns:
    """Moments at which an operator may run again.

    Parameters
    ----------
    moments
        Backward operators before which it may run, shape ``(moments,)``.
    runs
        Whether it runs, per mode and moment, shape ``(modes, moments)``.
    begins, computed
        First time of each rerun, and the end of its computation.
    """

    moments: IntArray
    runs: BoolArray
    begins: IntArray
    computed: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    """An operator that may run again and reads the value then.

    Parameters
    ----------
    node
        The operator.
    reruns
        Its reruns.
    copied, direct
        Time until which a rerun at each moment needs the value, where the reader takes a resharded copy of it, and
        where it reads the storage itself.
    aliases
        Layouts under which it reads the storage itself, shape ``(S_producer, S_reader)``.
    """

    node: int
    reruns: _Reruns
    copied: IntArray
    direct: IntArray
    aliases: BoolArray


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy of the value, in one mode of its producer.

    Parameters
    ----------
    mode
        The mode.
    first, replaced
        Reruns at moments from ``first`` on read it, until a rerun of its producer at ``replaced`` makes the next copy.
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
"""Placeholder of a copy that a mode does not make; it is never read."""


def add_holds(builder: RecomputeProblemBuilder) -> None:
    """Add the holds of inputs for reruns of their readers to a problem."""
    reruns = {v: _reruns(builder, v) for v in builder.reruns}
    for u, node in enumerate(builder.model.nodes):
        if node.kind is not NodeKind.FORWARD:
            continue
        edges: dict[int, dict[int, list[StepEdge]]] = {}
        for edge in builder.model.edges_from[u]:
            if edge.consumer in builder.reruns:
                edges.setdefault(edge.output, {}).setdefault(edge.consumer, []).append(edge)
        for output, by_reader in sorted(edges.items()):
            _HeldOutput(builder, reruns, u, output, by_reader).add()


def _reruns(builder: RecomputeProblemBuilder, v: int) -> _Reruns:
    moments, timeline = builder.moments[v], builder.timeline
    runs = np.zeros((builder.modes(v), len(moments)), dtype=np.bool_)
    for k, moment in enumerate(moments):
        runs[builder.modes_with(v, moment), k] = True
    events = [timeline.recompute[v][moment] for moment in moments]
    begins = np.array([timeline.start[event] for event in events], dtype=np.int64)
    computed = np.array([timeline.last_time(event) + 1 for event in events], dtype=np.int64)
    return _Reruns(np.array(moments, dtype=np.int64), runs, begins, computed)


def shortest_holds(problem: StrategyProblem, choices: Sequence[int]) -> tuple[int, ...]:
    """Complete choices of a step's nodes by the hold nodes, each as short as its readers allow.

    Parameters
    ----------
    problem
        A problem of a step, whose hold nodes follow the step's nodes.
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
        self,
        builder: RecomputeProblemBuilder,
        reruns: Mapping[int, _Reruns],
        u: int,
        output: int,
        by_reader: dict[int, list[StepEdge]],
    ) -> None:
        self.builder = builder
        self.u = u
        self.output = output
        self.bytes = builder.tables.one_of(builder.model.nodes[u].output_bytes[:, output])
        self.copies = [self._copies(mode) for mode in range(builder.modes(u))]
        earliest = min(copy.until for copies in self.copies for copy in copies)
        readers = [self._reader(v, reruns[v], edges) for v, edges in sorted(by_reader.items())]
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

    # ------------------------------------------------------------ lifetimes

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
        until = made[-1] if life.backward is None else max(life.backward.computed_end, made[-1])
        last_copy = _Copy(mode, moments[-1], end, until, life.backward)
        if self.u not in builder.rereads:
            return [last_copy]
        assert life.forward is not None, "what a rerun reads is read in forward"
        first_copy = _Copy(mode, 0, moments[0], life.forward.computed_end, life.forward)
        again = [
            _Copy(mode, first, replaced, time, None)
            for (first, replaced), time in zip(pairwise(moments), made[:-1], strict=True)
        ]
        return [first_copy, *again, last_copy]

    def _reader(self, v: int, reruns: _Reruns, edges: list[StepEdge]) -> _Reader:
        slot = max(edge.slot for edge in edges)
        copied = reruns.computed if self.builder.counting is Counting.OVER else reruns.begins + slot + 1
        return _Reader(v, reruns, copied, reruns.computed, read_directly(edges, self.builder.tables))

    # -------------------------------------------------------------- one reader

    def _hold_for(self, reader: _Reader) -> None:
        """Hold every copy as usage of the pair (producer, reader)."""
        rounds = list(zip_longest(*self.copies, fillvalue=_NO_COPY))
        first, replaced, until = np.array(
            [[(copy.first, copy.replaced, copy.until) for copy in copies] for copies in rounds], dtype=np.int64
        ).transpose(2, 0, 1)
        moments, runs = reader.reruns.moments, reader.reruns.runs
        reads = (moments >= first[..., None]) & (moments < replaced[..., None])
        read = runs & reads[:, :, None, :]
        copied, direct = (np.where(read, ends, 0).max(axis=-1) for ends in (reader.copied, reader.direct))
        self.builder.pair_usage((self.u, reader.node), self._between(until, copied, direct, reader.aliases))
        if self.builder.counting is not Counting.EXACT:
            return
        for mode, copies in enumerate(self.copies):
            for k, copy in enumerate(copies):
                later = np.repeat(copied[k, mode] > copy.until, reader.aliases.shape[1])
                self._through_last_use(copy, reader.node, later)

    # --------------------------------------------------------- several readers

    def _hold_by_node(self) -> None:
        """Hold the last copy until a time that a hold node chooses."""
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
        start = np.array([[copy.until for copy in last]], dtype=np.int64)
        chosen = np.broadcast_to(until, (*start.shape, until.shape[0]))
        always = np.ones((self.bytes.shape[0], 1), dtype=np.bool_)
        builder.pair_usage((self.u, hold), self._between(start, chosen, chosen, always))
        for reader in self.readers:
            self._forbid_too_early(hold, until, reader)
        if exact:
            for copy in last:
                self._through_last_use(copy, hold, until > copy.until)

    def _forbid_too_early(self, hold: int, until: IntArray, reader: _Reader) -> None:
        """Forbid holds that end before a rerun of the reader has the value."""
        builder, size = self.builder, reader.aliases.shape[1]
        copied, direct = (np.where(reader.reruns.runs, ends, 0).max(axis=1) for ends in (reader.copied, reader.direct))
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

    def _between(self, start: IntArray, copied: IntArray, direct: IntArray, aliases: BoolArray) -> list[UsageTerm]:
        """Usage of the value's bytes where it is held.

        Parameters
        ----------
        start
            Begin of the holds of copies, shape ``(rounds, modes)``: in every mode of the producer the first copies,
            the second ones, and so on.
        copied, direct
            End of the holds, for the modes of another node, shape ``(rounds, modes, other modes)``: where that node
            takes a resharded copy, and where it reads the storage itself.
        aliases
            Layouts under which it reads the storage itself, shape ``(S_producer, S_other)``.
        """
        tables = self.builder.tables
        start, ends = start[:, :, None], np.stack([copied, direct])
        possible = ends[[not aliases.all(), bool(aliases.any())]]
        held = start < possible
        points = np.unique(np.concatenate([np.broadcast_to(start, possible.shape)[held], possible[held]]))
        spans = points[:-1, None, None, None, None], points[1:, None, None, None, None]
        alive = np.logical_or.reduce((start <= spans[0]) & (ends >= spans[1]), axis=2)
        found: list[UsageTerm] = []
        for (since, until), now in zip(pairwise(points.tolist()), alive, strict=True):
            key = "held", now.shape, now.tobytes()
            amount = tables.made_of((self.bytes, aliases), key, partial(_amounts_held, self.bytes, aliases, *now))
            found += self.builder.term(since, until, amount)
        return found

    def _through_last_use(self, copy: _Copy, other: int, later: BoolArray) -> None:
        """Count a copy while its last direct reader computes on a resharded one, where it is held for later.

        ``later`` has a flag for every strategy of the node ``other``: whether it holds the copy beyond that use.
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


def _amounts_held(amount: IntArray, aliases: BoolArray, copied: BoolArray, direct: BoolArray) -> IntArray:
    """Bytes of a value over the strategies of its producer and of another node, where they are held.

    Parameters
    ----------
    amount
        Bytes per layout of the producer.
    aliases
        Layouts under which the other node reads the storage itself, shape ``(S_producer, S_other)``.
    copied, direct
        Whether the value is held in the modes of both nodes, where the other node takes a copy, and where it reads
        the storage itself.
    """
    (rows, columns), sizes = copied.shape, aliases.shape
    by_layout = np.where(aliases[:, None, :], direct[:, None, :, None], copied[:, None, :, None])
    return (amount[:, None, None] * by_layout).reshape(rows * sizes[0], columns * sizes[1])
