r"""H3T with synchronization as a free switch: a program over when operations end and how far every stream is.

Columns are the seven switches of every layer, the end :math:`e_o` of every operation, and the clock of every stream
in front of every segment, which is when all issued to it before have ended. With durations :math:`d_o`, :math:`x_o = 1`
where operation ``o`` happens, and ``H`` at least as large as the time of the best plan:

================================================================  =======================================
:math:`e_o \ge clock + d_o x_o`: streams are queues                :meth:`FreeProgram._add_segment`
:math:`e_b \ge e_a + d_b x_b`, where ``a`` is issued first         :meth:`FreeProgram._add_order`
:math:`e_b \ge e_a + d_b - H(1 - x_a) - H(1 - x_b)`: ``b`` waits   :meth:`FreeProgram._add_waits`
next clocks wait for all streams, or not: synchronization          :meth:`FreeProgram._close_segment`
memory                                                             :meth:`FreeProgram._add_memory`
================================================================  =======================================

Given the switches, the least ends are those of the simulator: an operation that does not happen takes no time where it
stands in its stream, and nothing waits for it. Memory is relaxed to what is certainly there while a layer computes,
whenever anything else happens. So the program is a relaxation: its bound holds for every plan, and its optimum is
optimal if the simulator finds it within the limit. If not, :meth:`FreeProgram.forbid` cuts it off, with what is alike
and no better.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.integer_program import IntegerProgram, ProgramBuilder
from formulations.h3t.operations import (
    BACKWARD_SEGMENT,
    FORWARD_SEGMENT,
    NONE,
    Operation,
    Rule,
    SegmentRules,
    Stream,
    Switch,
    Tensor,
)
from formulations.h3t.problem import H3tStep

__all__ = ["FreeProgram", "Values", "memory_floor"]

Values = NDArray[np.float64]
"""Of the columns."""

_Terms = list[tuple[int, int]]
_KEPT = {
    Switch.OFFLOAD_HIDDEN: Tensor.HIDDEN,
    Switch.REMAT: Tensor.ACTIVATIONS,
    Switch.PARTITION: Tensor.PARAMETERS,
}
"""What a layer keeps between forward and backward where a switch is off."""


def memory_floor(step: H3tStep) -> int:
    """Bytes below which no sequence fits, synchronized or not: what is certainly there if nothing is kept."""
    return step.borders.fixed_bytes + max(_computing_bytes(step))


def _computing_bytes(step: H3tStep) -> list[int]:
    """Bytes that are certainly there while layers 1 .. N and the loss compute, beside resident shards and what is kept.

    A layer has its input, results, parameters and output then, backward also their gradients; so it has workspace.
    """
    durations, sizes = step.durations(), step.sizes()
    last = sizes.shape[1] - 1
    found = []
    for i in range(1, last + 1):
        own: list[int] = sizes[:, i].tolist()
        above = int(sizes[Tensor.HIDDEN, i + 1]) if i < last else 0
        one_pass = own[Tensor.HIDDEN] + own[Tensor.ACTIVATIONS] + own[Tensor.PARAMETERS] + above
        forward = one_pass + own[Tensor.FORWARD_WORKSPACE] if i < last else 0
        gradients = own[Tensor.HIDDEN] + own[Tensor.PARAMETERS]
        computes = durations[Operation.BACKWARD, i] > 0
        found.append(max(forward, one_pass + gradients + own[Tensor.BACKWARD_WORKSPACE] if computes else 0))
    return found


class FreeProgram:
    """The program of a step; its objective leaves out :attr:`constant`.

    Parameters
    ----------
    step
        Layers and limit.
    horizon
        Quanta that some plan needs, or more.
    """

    def __init__(self, step: H3tStep, horizon: int) -> None:
        self.step, self.horizon = step, horizon
        self.constant = step.final_cost
        self._durations = step.durations()
        self._width = len(step.layers) + 2
        self._builder = ProgramBuilder()
        self._switches = [
            {switch: self._builder.binary() for switch in Switch} if 0 < layer < self._width - 1 else {}
            for layer in range(self._width)
        ]
        self._both: dict[tuple[int, Switch], int] = {}
        self._ends: dict[tuple[Operation, int], int] = {}
        self._clocks = {stream: self._builder.continuous(0, 0) for stream in self._streams()}
        for segment in range(self._width - 1):
            self._add_segment(FORWARD_SEGMENT, segment)
        for segment in reversed(range(self._width)):
            self._add_segment(BACKWARD_SEGMENT, segment)
        self._add_objective()
        self._add_memory()

    def program(self) -> IntegerProgram:
        """Return the program with everything that was forbidden so far."""
        return self._builder.build()

    def sequence(self, values: Values) -> tuple[int, ...]:
        """Read sets of switches from a solution."""
        return tuple(
            sum(int(switch) for switch, column in columns.items() if values[column] > 0.5)
            for columns in self._switches[1:-1]
        )

    def forbid(self, sequence: Sequence[int], compared: Sequence[int]) -> None:
        """Cut off a sequence and all that are like it.

        Parameters
        ----------
        sequence
            Sets of switches.
        compared
            Switches of each layer; whoever has these as in the sequence is cut off.
        """
        differs: _Terms = []
        on = 0
        for columns, switches, mask in zip(self._switches[1:-1], sequence, compared, strict=True):
            for switch, column in columns.items():
                if not switch & mask:
                    continue
                is_on = bool(switches & switch)
                on += is_on
                differs.append((column, -1 if is_on else 1))
        self._builder.at_least(differs, 1 - on)

    def _streams(self) -> list[Stream]:
        return [stream for stream in Stream if self.step.device_link or stream is not Stream.DEVICE]

    def _stream(self, rule: Rule) -> Stream:
        return rule.stream if self.step.device_link or rule.stream is not Stream.DEVICE else Stream.HOST

    def _happens(self, rule: Rule, layer: int) -> int | None:
        """Column that says whether an operation happens, None where it always does."""
        if rule.when is NONE:
            return None
        needed = [switch for switch in Switch if switch in rule.when]
        if len(needed) == 1:
            return self._switches[layer][needed[0]]
        if (layer, rule.when) not in self._both:
            columns = [self._switches[layer][switch] for switch in needed]
            both = self._builder.continuous(0, 1)
            for column in columns:
                self._builder.at_most([(both, 1), (column, -1)], 0)
            self._builder.at_least([(both, 1), *((column, -1) for column in columns)], 1 - len(columns))
            self._both[layer, rule.when] = both
        return self._both[layer, rule.when]

    def _exists(self, rule: Rule, segment: int) -> bool:
        layer = segment + rule.offset
        return 0 <= layer < self._width and self._durations[rule.operation, layer] >= 0

    def _taken(self, rule: Rule, layer: int, sign: int) -> tuple[_Terms, int]:
        """Terms and constant of a duration where the operation happens, times `sign`."""
        duration, happens = sign * int(self._durations[rule.operation, layer]), self._happens(rule, layer)
        return ([], duration) if happens is None else ([(happens, duration)], 0)

    def _add_segment(self, side: SegmentRules, segment: int) -> None:
        groups = [
            [rule for rule in group if self._exists(rule, segment)] for group in (side.compute, side.post, side.prepare)
        ]
        rules = [rule for group in groups for rule in group]
        for rule in rules:
            layer = segment + rule.offset
            end = self._builder.continuous(0, self.horizon)
            self._ends[rule.operation, layer] = end
            terms, constant = self._taken(rule, layer, -1)
            self._builder.at_least([(end, 1), (self._clocks[self._stream(rule)], -1), *terms], -constant)
        for rule in rules:
            self._add_waits(rule, segment + rule.offset)
        for group in groups:
            for k, later in enumerate(group):
                for earlier in group[:k]:
                    self._add_order(earlier, later, segment, None, 0)
        economical = self._switches[segment].get(side.economical)
        for post in groups[1]:
            for prepare in groups[2]:
                self._add_order(prepare, post, segment, economical, 0)
                if economical is not None:
                    self._add_order(post, prepare, segment, economical, 1)
        self._close_segment(rules, segment)

    def _add_order(self, earlier: Rule, later: Rule, segment: int, switch: int | None, value: int) -> None:
        """One of two operations of a stream is issued first, where a switch has a value."""
        if self._stream(earlier) != self._stream(later):
            return
        first, second = segment + earlier.offset, segment + later.offset
        terms, constant = self._taken(later, second, -1)
        terms += [(self._ends[later.operation, second], 1), (self._ends[earlier.operation, first], -1)]
        if switch is not None:
            terms.append((switch, self.horizon if value == 0 else -self.horizon))
            constant += 0 if value == 0 else self.horizon
        self._builder.at_least(terms, -constant)

    def _add_waits(self, rule: Rule, layer: int) -> None:
        """What an operation comes after."""
        for operation, offset in rule.after:
            earlier = self._ends.get((operation, layer + offset))
            if earlier is None:
                continue
            terms, constant = self._taken(rule, layer, -1)
            terms += [(self._ends[rule.operation, layer], 1), (earlier, -1)]
            for happens in {self._happens(rule, layer), self._happens(_RULE_OF[operation], layer + offset)} - {None}:
                assert happens is not None
                terms.append((happens, -self.horizon))
                constant += self.horizon
            self._builder.at_least(terms, -constant)

    def _close_segment(self, rules: Sequence[Rule], segment: int) -> None:
        """Clocks behind a segment, and in front of the next one."""
        behind = {}
        for stream in self._streams():
            clock = self._builder.continuous(0, self.horizon)
            mine = [rule for rule in rules if self._stream(rule) is stream]
            terms: _Terms = [(clock, 1), (self._clocks[stream], -1)]
            constant = 0
            for rule in mine:
                layer = segment + rule.offset
                self._builder.at_least([(clock, 1), (self._ends[rule.operation, layer], -1)], 0)
                taken, fixed = self._taken(rule, layer, -1)
                terms += taken
                constant += fixed
            self._builder.at_least(terms, -constant)
            behind[stream] = clock
        sync = self._switches[segment].get(Switch.SEGMENT_SYNC)
        if sync is None:
            together = self._builder.continuous(0, self.horizon)
            for clock in behind.values():
                self._builder.at_least([(together, 1), (clock, -1)], 0)
            self._clocks = dict.fromkeys(behind, together)
            return
        self._clocks = {stream: self._builder.continuous(0, self.horizon) for stream in behind}
        for stream, clock in self._clocks.items():
            for other, ended in behind.items():
                terms = [(clock, 1), (ended, -1)]
                if other is stream:
                    self._builder.at_least(terms, 0)
                else:
                    self._builder.at_least([*terms, (sync, -self.horizon)], -self.horizon)

    def _add_objective(self) -> None:
        """All segments, and what loads the resident shards behind them."""
        total = self._builder.continuous(0, 2 * self.horizon, cost=1)
        terms: _Terms = [(total, 1), (next(iter(self._clocks.values())), -1)]
        for columns, layer in zip(self._switches[1:-1], self.step.layers, strict=True):
            terms.append((columns[Switch.LAZY_PREFETCH], layer.shard_copy))
        self._builder.at_least(terms, sum(layer.shard_copy for layer in self.step.layers))

    def _add_memory(self) -> None:
        """While a layer or the loss computes, everything that is certainly there fits."""
        room = self.step.memory_limit - self.step.borders.fixed_bytes
        saved: _Terms = []
        for columns, layer in zip(self._switches[1:-1], self.step.layers, strict=True):
            room -= layer.shard_bytes
            saved.append((columns[Switch.LAZY_PREFETCH], -layer.shard_bytes))
        sizes = self.step.sizes()
        for i, there in enumerate(_computing_bytes(self.step), start=1):
            self._builder.at_most(saved, room - there)
            for switch, column in self._switches[i].items():
                if switch in _KEPT:
                    size = int(sizes[_KEPT[switch], i])
                    room -= size
                    saved.append((column, -size))


_RULE_OF = {
    rule.operation: rule
    for side in (FORWARD_SEGMENT, BACKWARD_SEGMENT)
    for rule in (*side.compute, *side.post, *side.prepare)
}
