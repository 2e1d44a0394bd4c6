r"""H3T with synchronization as a free switch: problem (3) as one CP-SAT model, the simulator restated.

Variables are the seven switches of every layer, the start and end of every operation, and the clock of every stream in
front of every segment. Starts and ends are equations, not bounds, as the simulator never waits: memory depends on them.

=============================================================  =============================================
:math:`start_o = \max(clock, ends)` of what ``o`` waits for     :meth:`_EventModel.issue`
:math:`end_o = start_o + d_o` where ``o`` happens, else 0       :meth:`_EventModel.issue`
clocks behind a segment: of all streams if synchronized         :meth:`_EventModel.pass_segment`
tensors are intervals, at any moment within the limit           :meth:`_EventModel.remember`
=============================================================  =============================================

Two families of rows are implied and tighten the linear relaxation: what streams work between two borders, which always
synchronize, and what is certainly there while a layer computes.

It proves steps of a few layers in less time than branch and cut on the relaxed program of
:mod:`formulations.h3t.program`; for many layers that one's bounds are better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from formulations.h3t.operations import (
    BACKWARD_SEGMENT,
    FORWARD_SEGMENT,
    LIVES,
    NONE,
    Life,
    Operation,
    Rule,
    SegmentRules,
    Stream,
    Switch,
)
from formulations.h3t.problem import H3tStep
from formulations.h3t.program import KEPT, computing_bytes

__all__ = ["EventResult", "solve_events"]

_LEAST_SECONDS = 0.01
"""Not tunable: a solve that gets less has no time to begin."""


@dataclass(frozen=True, slots=True)
class EventResult:
    """What CP-SAT says of a step.

    Parameters
    ----------
    sequence
        Sets of switches of the best solution, or None where none was found.
    bound
        No sequence that fits costs less.
    infeasible, optimal
        Whether it is proven that nothing fits, and that nothing is cheaper.
    message
        Its status.
    """

    sequence: tuple[int, ...] | None
    bound: int
    infeasible: bool
    optimal: bool
    message: str


def solve_events(step: H3tStep, seconds: float, seed: int = 0, start: Sequence[int] | None = None) -> EventResult:
    """Solve the model of a step, in one thread.

    Parameters
    ----------
    step
        Layers and limit.
    seconds
        Time limit.
    seed
        Of CP-SAT.
    start
        Sets of switches to begin with.
    """
    from ortools.sat.python import cp_model

    made = _EventModel(step)
    for i, switches in enumerate(start or (), start=1):
        for switch in Switch:
            made.model.add_hint(made.switches[switch, i], bool(switches & switch))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2  # its relaxation proves some steps that it does not without
    solver.parameters.random_seed = seed % (1 << 31)
    solver.parameters.max_time_in_seconds = max(_LEAST_SECONDS, seconds)
    status = solver.solve(made.model)
    sequence = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        sequence = tuple(
            sum(int(switch) for switch in Switch if solver.value(made.switches[switch, i]))
            for i in range(1, len(step.layers) + 1)
        )
    bound = max(0, round(solver.best_objective_bound))  # an integer, as costs are
    optimal, infeasible = status == cp_model.OPTIMAL, status == cp_model.INFEASIBLE
    return EventResult(sequence, bound, infeasible, optimal, f"CP-SAT: {solver.status_name(status)}")


_Place = tuple[Operation, int]
"""An operation and the layer that it belongs to."""


class _EventModel:
    """The model of a step; ``switches`` has a literal for each switch and layer, borders included."""

    def __init__(self, step: H3tStep) -> None:
        from ortools.sat.python import cp_model

        self.step, self.model = step, cp_model.CpModel()
        self._durations, self._sizes = step.durations().tolist(), step.sizes().tolist()
        self._width = len(step.layers) + 2
        self._horizon = sum(max(0, each) for row in self._durations for each in row)
        self.switches = {
            (switch, i): self.model.new_bool_var(f"{switch.name} {i}")
            for i in range(1, self._width - 1)
            for switch in Switch
        }
        self._starts: dict[_Place, Any] = {}
        self._ends: dict[_Place, Any] = {}
        self._streams = [stream for stream in Stream if step.device_link or stream is not Stream.DEVICE]
        self._clock: dict[Stream, Any] = dict.fromkeys(self._streams, 0)
        self._border: Any = 0
        self._work: dict[Stream, Any] = dict.fromkeys(self._streams, 0)
        for i in range(self._width - 1):
            self.pass_segment(FORWARD_SEGMENT, i)
        for i in reversed(range(self._width)):
            self.pass_segment(BACKWARD_SEGMENT, i)
        self.remember()
        loads = sum(layer.shard_copy * resident for layer, resident in self._resident())
        self.model.minimize(self._clock[self._streams[0]] + loads + step.final_cost)

    def pass_segment(self, side: SegmentRules, i: int) -> None:
        """Section 3.2.3: issue a segment's operations; behind it clocks wait for each other, or not."""
        groups = [self._issued(side, i, of) for of in (side.compute, side.post, side.prepare)]
        for rule, layer in (each for group in groups for each in group):
            self._add_operation(rule, layer)
        compute, post, prepare = groups
        economical = self.switches.get((side.economical, i))
        for group in groups:
            for place, (rule, layer) in enumerate(group):
                first = [*group[:place], *(() if group is compute else compute)]
                before = [self._ends[one.operation, at] for one, at in self._beside(rule, first)]
                other = prepare if group is post else post if group is prepare else []
                for one, at in self._beside(rule, other):
                    before += self._if_first(self._ends[one.operation, at], economical, group is post)
                self.issue(rule, layer, before)
        self._advance(groups, i)

    def issue(self, rule: Rule, layer: int, before: Iterable[Any]) -> None:
        """Section 3.1: an operation starts when its stream is free and what it comes after has ended."""
        after = [self._ends[o, layer + offset] for o, offset in rule.after if (o, layer + offset) in self._ends]
        start = self._starts[rule.operation, layer]
        self.model.add_max_equality(start, [self._clock[self._stream(rule)], *before, *after])

    def remember(self) -> None:
        """(3): tensors that are there at one moment fit, beside the resident shards."""
        intervals, sizes = [], []
        for i in range(self._width):
            for life in LIVES:
                size = self._sizes[life.tensor][i]
                if size and (life.on is NONE or self._has_switches(i)):
                    intervals.append(self._interval(life, i))
                    sizes.append(size)
        most = self.step.memory_limit - self.step.borders.fixed_bytes
        room = self.model.new_int_var(0, max(0, most), "room")
        shards = sum(layer.shard_bytes * resident for layer, resident in self._resident())
        self.model.add(room == most - shards)
        kept: Any = 0
        for i, computing in enumerate(computing_bytes(self.step), start=1):
            self.model.add(kept + computing <= room)
            if self._has_switches(i):
                kept += sum(self._sizes[tensor][i] * (1 - self.switches[each, i]) for each, tensor in KEPT.items())
        self.model.add_cumulative(intervals, sizes, room)

    def _interval(self, life: Life, i: int) -> Any:
        begin = self._starts[life.begin[0], i + life.begin[1]]
        last, length = self._moment(), self._moment()
        ends = [self._ends[o, i + offset] for o, offset in life.ends if (o, i + offset) in self._ends]
        self.model.add_max_equality(last, [begin, *ends])
        there = self._all(life.on, life.off, i)
        if there is None:
            return self.model.new_interval_var(begin, length, last, "")
        return self.model.new_optional_interval_var(begin, length, last, there, "")

    def _add_operation(self, rule: Rule, layer: int) -> None:
        place = rule.operation, layer
        self._starts[place] = self._moment()
        duration = self._durations[rule.operation][layer]
        end = self._starts[place] + duration
        happens = self._all(rule.when, NONE, layer)
        self._work[self._stream(rule)] += duration if happens is None else duration * happens
        self._ends[place] = end if happens is None else self._or_zero(end, happens)

    def _if_first(self, end: Any, economical: Any, is_post: bool) -> list[Any]:
        """What an end counts for the other of post and prepare: it is issued first, or it counts 0."""
        if economical is None:  # a border, which prepares first
            return [end] if is_post else []
        return [self._or_zero(end, ~economical if is_post else economical)]

    def _advance(self, groups: list[list[tuple[Rule, int]]], i: int) -> None:
        behind = {}
        for stream in self._streams:
            ended = [
                self._ends[rule.operation, layer]
                for group in groups
                for rule, layer in group
                if self._stream(rule) is stream
            ]
            behind[stream] = self._moment()
            self.model.add_max_equality(behind[stream], [self._clock[stream], *ended])
        together = self._moment()
        self.model.add_max_equality(together, list(behind.values()))
        synchronized = self.switches.get((Switch.SEGMENT_SYNC, i))
        if synchronized is None:
            for work in self._work.values():
                self.model.add(together >= self._border + work)
            self._clock, self._border = dict.fromkeys(self._streams, together), together
            self._work = dict.fromkeys(self._streams, 0)
            return
        for stream in self._streams:
            self._clock[stream] = self._moment()
            self.model.add(self._clock[stream] == together).only_enforce_if(synchronized)
            self.model.add(self._clock[stream] == behind[stream]).only_enforce_if(~synchronized)

    # --------------------------------------------------------------- pieces

    def _issued(self, side: SegmentRules, i: int, rules: Iterable[Rule]) -> list[tuple[Rule, int]]:
        found = [(rule, i + rule.offset) for rule in rules if 0 <= i + rule.offset < self._width]
        return [(rule, layer) for rule, layer in found if self._durations[rule.operation][layer] >= 0]

    def _beside(self, rule: Rule, others: Iterable[tuple[Rule, int]]) -> list[tuple[Rule, int]]:
        """Those in the same stream."""
        return [(one, layer) for one, layer in others if self._stream(one) is self._stream(rule)]

    def _stream(self, rule: Rule) -> Stream:
        return rule.stream if rule.stream in self._streams else Stream.HOST

    def _has_switches(self, i: int) -> bool:
        return 0 < i < self._width - 1

    def _resident(self) -> list[tuple[Any, Any]]:
        """Layers with 1 where their shard is on the device all the time."""
        return [
            (layer, 1 - self.switches[Switch.LAZY_PREFETCH, i]) for i, layer in enumerate(self.step.layers, start=1)
        ]

    def _moment(self) -> Any:
        return self.model.new_int_var(0, self._horizon, "")

    def _or_zero(self, value: Any, literal: Any) -> Any:
        """A value where a literal holds, else 0."""
        found = self._moment()
        self.model.add(found == value).only_enforce_if(literal)
        self.model.add(found == 0).only_enforce_if(~literal)
        return found

    def _all(self, on: Switch, off: Switch, i: int) -> Any:
        """A literal for: some switches of a layer are on and others off; None where that is always so."""
        if not self._has_switches(i):
            return None
        literals = [self.switches[each, i] for each in Switch if each & on]
        literals += [~self.switches[each, i] for each in Switch if each & off]
        if len(literals) < 2:
            return literals[0] if literals else None
        found = self.model.new_bool_var("")
        self.model.add_bool_and(literals).only_enforce_if(found)
        self.model.add_bool_or([found, *(~each for each in literals)])
        return found
