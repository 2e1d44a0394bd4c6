r"""H3T with synchronization as a free switch: a program over when operations end and how far every stream is.

Problem (3) of the paper is the least ``Runtime(s)`` such that ``Memory(s)`` is at most ``M``. There a simulator tells
both; here they are rows. Variables are the seven switches ``s`` of every layer, the end ``e`` of every operation, and
the clock of every stream in front of every segment, which is when all issued to it before have ended. With durations
:math:`d_o`, :math:`x_o = 1` where operation ``o`` happens, and ``H`` at least as large as the time of the best plan:

================================================================  ==========================================
:math:`e_o \ge clock + d_o x_o`: streams are queues                :meth:`FreeProgram.stream_is_a_queue`
:math:`e_b \ge e_a + d_b x_b`, where ``a`` is issued first         :meth:`FreeProgram.issued_first`
:math:`e_b \ge e_a + d_b - H(1 - x_a) - H(1 - x_b)`: ``b`` waits   :meth:`FreeProgram.waits`
next clocks wait for all streams, or not: synchronization          :meth:`FreeProgram.synchronized`
memory                                                             :meth:`FreeProgram.memory`
================================================================  ==========================================

Given the switches, the least ends are those of the simulator: an operation that does not happen takes no time where it
stands in its stream, and nothing waits for it. Memory is relaxed to what is certainly there while a layer computes,
whenever anything else happens. So the program is a relaxation: its bound holds for every plan, and its optimum is
optimal if the simulator finds it within the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from formulations.encodings.integer_program import IntegerProgram
from formulations.encodings.pyomo_program import PyomoProgram, Values, add_rows
from formulations.h3t.operations import (
    BACKWARD_SEGMENT,
    FORWARD_SEGMENT,
    Operation,
    SegmentRules,
    Stream,
    Switch,
    Tensor,
)
from formulations.h3t.problem import H3tStep
from formulations.problem.gc_pause import gc_paused

__all__ = ["KEPT", "FreeProgram", "computing_bytes", "memory_floor"]

_Issued = tuple[Operation, int]
"""An operation and the layer that it belongs to."""

KEPT = {
    Switch.OFFLOAD_HIDDEN: Tensor.HIDDEN,
    Switch.REMAT: Tensor.ACTIVATIONS,
    Switch.PARTITION: Tensor.PARAMETERS,
}
"""What a layer keeps between forward and backward where a switch is off."""

_RULE_OF = {
    rule.operation: rule
    for side in (FORWARD_SEGMENT, BACKWARD_SEGMENT)
    for rule in (*side.compute, *side.post, *side.prepare)
}


def memory_floor(step: H3tStep) -> int:
    """Bytes below which no sequence fits, synchronized or not: what is certainly there if nothing is kept."""
    return step.borders.fixed_bytes + max(computing_bytes(step))


def computing_bytes(step: H3tStep) -> list[int]:
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
    """The Pyomo model of a step, :attr:`model`; its objective leaves out :attr:`constant`.

    Indices are numbers of layers (0 is the embedding, N + 1 the loss), of segments in their order, and the names of
    switches, operations and streams.

    Parameters
    ----------
    step
        Layers and limit.
    horizon
        Quanta that some plan needs, or more.
    """

    def __init__(self, step: H3tStep, horizon: int) -> None:
        from pyomo.core import ConcreteModel

        self.step, self.horizon = step, horizon
        self.constant = step.final_cost
        self._durations, self._sizes = step.durations().tolist(), step.sizes().tolist()
        self._computing = computing_bytes(step)
        self._width = len(step.layers) + 2
        self._layers = range(1, self._width - 1)
        self._streams = [stream for stream in Stream if step.device_link or stream is not Stream.DEVICE]
        self._segments: list[tuple[SegmentRules, int]] = [
            *((FORWARD_SEGMENT, layer) for layer in range(self._width - 1)),
            *((BACKWARD_SEGMENT, layer) for layer in reversed(range(self._width))),
        ]
        self.model: Any = ConcreteModel(name="h3t")
        with gc_paused():
            self._build(self.model)
        self._program = PyomoProgram(self.model)

    def program(self) -> IntegerProgram:
        """Return the program."""
        return self._program.integer_program()

    def sequence(self, values: Values) -> tuple[int, ...]:
        """Read sets of switches from a solution."""
        self._program.load(values)
        return tuple(
            sum(int(switch) for switch in Switch if self.model.s[switch.name, i].value > 0.5) for i in self._layers
        )

    def _build(self, m: Any) -> None:
        from pyomo.core import Binary, Objective, Var

        self._issued = {(o, i): k for k in range(len(self._segments)) for group in self._groups(k) for o, i in group}
        products = [(o, i) for o, i in self._issued if len(_RULE_OF[o].when) > 1]
        streams = [stream.name for stream in self._streams]
        segments = range(len(self._segments))
        m.s = Var([(switch.name, i) for i in self._layers for switch in Switch], domain=Binary)
        m.both = Var(_named(products), bounds=(0, 1))
        m.e = Var(_named(self._issued), bounds=(0, self.horizon))
        m.behind = Var(segments, streams, bounds=(0, self.horizon))
        m.clock = Var(range(len(self._segments) + 1), streams, bounds=(0, self.horizon))
        m.Runtime = Var(bounds=(0, 2 * self.horizon))
        m.least_runtime = Objective(expr=m.Runtime)
        add_rows(m, self.streams_begin, streams)
        add_rows(m, self.both_at_most, [(o.name, i, switch.name) for o, i in products for switch in _RULE_OF[o].when])
        add_rows(m, self.both_at_least, _named(products))
        add_rows(m, self.stream_is_a_queue, _named(self._issued))
        add_rows(m, self.waits, [at for o, i in self._issued for at in self._waiting(o, i)])
        add_rows(m, self.issued_first, [at for k in segments for at in self._orders(k)])
        add_rows(m, self.economical, [at for k in segments for at in self._choices(k)])
        add_rows(m, self.behind_every_end, _named(self._issued))
        add_rows(m, self.behind_all_work, [(k, stream) for k in segments for stream in streams])
        add_rows(m, self.synchronized, [(k, one, other) for k in segments for one in streams for other in streams])
        add_rows(m, self.runtime)
        add_rows(m, self.memory, range(1, self._width))

    # ------------------------------------------------------------- switches

    def both_at_most(self, m: Any, o: str, i: int, switch: str) -> Any:
        r""":math:`x_o \le s` for each of the switches that an operation needs."""
        return m.both[o, i] <= m.s[switch, i]

    def both_at_least(self, m: Any, o: str, i: int) -> Any:
        r""":math:`x_o \ge 1 - \sum_s (1 - s)` over the switches that an operation needs."""
        return m.both[o, i] >= 1 - sum(1 - m.s[switch.name, i] for switch in _RULE_OF[Operation[o]].when)

    def happens(self, m: Any, o: Operation, i: int) -> Any:
        """:math:`x_o`: whether an operation happens; the number 1 where it always does."""
        needed = [str(switch.name) for switch in _RULE_OF[o].when]
        if len(needed) > 1:
            return m.both[o.name, i]
        return m.s[needed[0], i] if needed else 1

    def taken(self, m: Any, o: Operation, i: int) -> Any:
        """:math:`d_o x_o`."""
        return self._durations[o][i] * self.happens(m, o, i)

    # ----------------------------------------------------------------- time

    def streams_begin(self, m: Any, stream: str) -> Any:
        """Section 3.2.3: all streams begin together, at 0."""
        return m.clock[0, stream] == 0

    def stream_is_a_queue(self, m: Any, o: str, i: int) -> Any:
        r"""Section 3.2.3: :math:`e_o \ge clock + d_o x_o` of its stream in front of the segment."""
        operation = Operation[o]
        clock = m.clock[self._issued[operation, i], self._stream(operation).name]
        return m.e[o, i] >= clock + self.taken(m, operation, i)

    def waits(self, m: Any, o: str, i: int, after: str, j: int) -> Any:
        r"""Section 3.1: :math:`e_b \ge e_a + d_b x_b - H (1 - x_a) - H (1 - x_b)`, for what ``b`` needs of ``a``."""
        operation, earlier = Operation[o], Operation[after]
        conditions = {id(x): x for x in (self.happens(m, operation, i), self.happens(m, earlier, j))}
        slack = sum(self.horizon * (1 - x) for x in conditions.values())
        return m.e[o, i] >= m.e[after, j] + self.taken(m, operation, i) - slack

    def issued_first(self, m: Any, o: str, i: int, earlier: str, j: int) -> Any:
        r"""Section 3.2.3: :math:`e_b \ge e_a + d_b x_b` in one stream, where ``a`` is always issued first."""
        return m.e[o, i] >= m.e[earlier, j] + self.taken(m, Operation[o], i)

    def economical(self, m: Any, k: int, o: str, i: int, earlier: str, j: int, on: int) -> Any:
        r"""Section 3.2.3: the same where ``a`` is issued first only if the segment is economical, or only if not."""
        side, layer = self._segments[k]
        switch = m.s[side.economical.name, layer]
        slack = self.horizon * (1 - switch if on else switch)
        return m.e[o, i] >= m.e[earlier, j] + self.taken(m, Operation[o], i) - slack

    def behind_every_end(self, m: Any, o: str, i: int) -> Any:
        r"""The clock of a stream behind a segment: :math:`behind \ge e_o`."""
        operation = Operation[o]
        return m.behind[self._issued[operation, i], self._stream(operation).name] >= m.e[o, i]

    def behind_all_work(self, m: Any, k: int, stream: str) -> Any:
        r"""The same: :math:`behind \ge clock + \sum_o d_o x_o`, which is implied and tightens the relaxation."""
        mine = [(o, i) for group in self._groups(k) for o, i in group if self._stream(o).name == stream]
        return m.behind[k, stream] >= m.clock[k, stream] + sum(self.taken(m, o, i) for o, i in mine)

    def synchronized(self, m: Any, k: int, stream: str, other: str) -> Any:
        r"""Section 3.2.3: a clock waits for the other streams with segment synchronization, else for its own alone.

        Borders have no switches and are always synchronized.
        """
        _, layer = self._segments[k]
        free = stream != other and layer in self._layers
        slack = self.horizon * (1 - m.s[Switch.SEGMENT_SYNC.name, layer]) if free else 0
        return m.clock[k + 1, stream] >= m.behind[k, other] - slack

    def runtime(self, m: Any) -> Any:
        """(3), ``Runtime(s)``: all segments, and what loads the resident shards behind them."""
        loads = sum(
            layer.shard_copy * (1 - m.s[Switch.LAZY_PREFETCH.name, i])
            for i, layer in zip(self._layers, self.step.layers, strict=True)
        )
        return m.Runtime >= m.clock[len(self._segments), self._streams[0].name] + loads

    # --------------------------------------------------------------- memory

    def memory(self, m: Any, i: int) -> Any:
        r"""(3), :math:`Memory(s) \le M`: while layer ``i`` or the loss computes, all that is certainly there fits.

        These are the resident shards, what earlier layers keep, and what computing takes.
        """
        shards = sum(
            layer.shard_bytes * (1 - m.s[Switch.LAZY_PREFETCH.name, j])
            for j, layer in zip(self._layers, self.step.layers, strict=True)
        )
        kept = sum(
            self._sizes[tensor][j] * (1 - m.s[switch.name, j])
            for j in self._layers
            if j < i
            for switch, tensor in KEPT.items()
        )
        there = self.step.borders.fixed_bytes + self._computing[i - 1]
        return shards + kept + there <= self.step.memory_limit

    # --------------------------------------------------------------- pieces

    def _stream(self, o: Operation) -> Stream:
        stream = _RULE_OF[o].stream
        return stream if self.step.device_link or stream is not Stream.DEVICE else Stream.HOST

    def _groups(self, k: int) -> list[list[_Issued]]:
        """Operations that a segment issues: what it computes, what it ends, what it prepares."""
        side, segment = self._segments[k]
        groups = [[(r.operation, segment + r.offset) for r in of] for of in (side.compute, side.post, side.prepare)]
        return [[(o, i) for o, i in of if 0 <= i < self._width and self._durations[o][i] >= 0] for of in groups]

    def _waiting(self, o: Operation, i: int) -> Iterator[tuple[str, int, str, int]]:
        """An operation with each that it comes after."""
        for after, offset in _RULE_OF[o].after:
            if (after, i + offset) in self._issued:
                yield o.name, i, after.name, i + offset

    def _pairs(self, first: Iterable[_Issued], second: Iterable[_Issued]) -> Iterator[tuple[str, int, str, int]]:
        """Pairs in one stream, what is issued second in front."""
        for (a, j), (b, i) in product(first, second):
            if self._stream(a) is self._stream(b):
                yield b.name, i, a.name, j

    def _orders(self, k: int) -> Iterator[tuple[str, int, str, int]]:
        """Operations of a segment that are always issued in one order."""
        groups = self._groups(k)
        for group in groups:
            for at, later in enumerate(group):
                yield from self._pairs(group[:at], [later])
        if self._segments[k][1] not in self._layers:
            yield from self._pairs(groups[2], groups[1])

    def _choices(self, k: int) -> Iterator[tuple[int, str, int, str, int, int]]:
        """Operations of a segment whose order a switch decides; last is its value."""
        if self._segments[k][1] in self._layers:
            _, post, prepare = self._groups(k)
            yield from ((k, *pair, 0) for pair in self._pairs(prepare, post))
            yield from ((k, *pair, 1) for pair in self._pairs(post, prepare))


def _named(operations: Iterable[_Issued]) -> list[tuple[str, int]]:
    return [(o.name, i) for o, i in operations]
