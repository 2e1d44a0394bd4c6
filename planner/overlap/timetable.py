"""Times of transfers: when each starts beside the computation, and when the computation waits for it.

The instructions that are no part of a transfer keep their order. While they are written again one after another, a
clock runs for the computation and one for each mesh axis:

- A gather starts as late as it can be there in time, or up to an *eagerness* times its duration before; where the
  memory limit has no room for its bytes until they are needed, it starts later.
- A reduction starts when its gradient is there and its link has time; gathers go first. It is waited for when it has
  run, where that frees memory, else before its update. Where bytes of those under way do not fit, they are waited for.
- Where transfers *give way*, a gather has the time in its span in which resharded activations need its link least, and
  a reduction does not start before one of them while the link has time enough behind it: what shares a link with the
  computation holds it up for as long as that takes.
- Updates come in the order in which their gradients arrive.

The clocks do not know what streams take from each other. So the replay judges the result (:mod:`planner.overlap.best`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import OperatorGraph
from planner.overlap.transfers import Transfer, single_steps, transfers
from planner.replay.clocks import StepCosts, instruction_quanta
from planner.replay.memory import LocalBytes
from planner.replay.structure import communicating_axes
from planner.schedule.instructions import (
    Buffer,
    Free,
    Instruction,
    Reshard,
    Schedule,
    Update,
    Wait,
    sends_copy,
)
from planner.scheduling.builder import kept_buffers, with_frees


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Memory of the serial schedule: bytes during each instruction, and the limit (None for no limit)."""

    during: NDArray[np.int64]
    limit: int | None


@dataclass(slots=True)
class _Task:
    """A transfer being written.

    Parameters
    ----------
    transfer
        The transfer.
    before
        Positions of the views that lead to its source, until they are written.
    steps
        Its steps that have not started.
    costs
        Their quanta.
    held
        Bytes by which it now holds more than the serial schedule does.
    flying, ends
        The step under way, and its end.
    """

    transfer: Transfer
    before: tuple[int, ...]
    steps: deque[Reshard]
    costs: deque[int]
    begin: int = 0
    held: int = 0
    flying: Reshard | None = None
    ends: int = 0
    is_done: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether a step is under way or all are done."""
        return self.flying is not None or self.is_done

    @property
    def next_collective(self) -> Reshard | None:
        """The next step that communicates."""
        return next((step for step in self.steps if step.overlapped), None)


def overlapped(
    graph: OperatorGraph,
    schedule: Schedule,
    costs: StepCosts,
    room: Room,
    eagerness: float = 1.0,
    *,
    give_way: bool = False,
) -> Schedule:
    """The schedule with its transfers beside the computation.

    Parameters
    ----------
    graph, schedule
        A correct schedule without overlapped collectives and without offload.
    costs
        Prices of instructions.
    room
        Memory of the schedule.
    eagerness
        How many times its duration a gather starts before it is needed, at most where it gives way.
    give_way
        Whether transfers give way to resharded activations.
    """
    return _Timetable(graph, schedule, costs, room, eagerness, give_way).write()


class _Timetable:
    def __init__(
        self,
        graph: OperatorGraph,
        schedule: Schedule,
        costs: StepCosts,
        room: Room,
        eagerness: float,
        give_way: bool,
    ) -> None:
        self._graph, self._schedule, self._costs, self._room = graph, schedule, costs, room
        self._local_bytes = LocalBytes(graph, schedule.mesh)
        self._buffers = list(schedule.buffers)
        self._written: list[Instruction] = []
        self._now = 0
        self._link: dict[int, int] = defaultdict(int)
        self._flying: dict[int, _Task] = {}
        """Transfers under way, and those that hold bytes while they wait, by position."""
        self._holding: dict[int, _Task] = {}
        self._tasks = [self._task(transfer) for transfer in transfers(graph, schedule)]
        moved = {at for task in self._tasks for at in task.transfer.positions}
        self._kept = [
            at for at, entry in enumerate(schedule.instructions) if at not in moved and not isinstance(entry, Free)
        ]
        self._quanta = [self._price(schedule.instructions[at]) for at in self._kept]
        self._begins = np.concatenate(([0], np.cumsum(np.array(self._quanta, dtype=np.int64))))
        self._extra = np.zeros(len(schedule.instructions) + 1, dtype=np.int64)
        self._give_way = give_way
        self._blocking = [self._blocked(axis) for axis in range(len(schedule.mesh))]
        self._left: dict[int, int] = defaultdict(int)
        """Quanta of reductions that have not started, by axis."""
        for task in self._tasks:
            if not task.transfer.is_gather:
                for step, cost in zip(task.steps, task.costs, strict=True):
                    if step.overlapped:
                        self._left[_axis(step)] += cost
        self._plan_gathers(eagerness)

    def write(self) -> Schedule:
        gathers = deque(task for task in self._tasks if task.transfer.is_gather)
        coming = deque(task for task in self._tasks if not task.transfer.is_gather)
        by_need: dict[int, list[_Task]] = defaultdict(list)
        for task in self._tasks:
            by_need[task.transfer.needed].append(task)
        waiting: list[_Task] = []
        updates: list[int] = []
        for place, (at, cost) in enumerate(zip(self._kept, self._quanta, strict=True)):
            entry = self._schedule.instructions[at]
            if isinstance(entry, Update):
                updates.append(at)
                continue
            while coming and coming[0].transfer.reshard < at:
                waiting.append(coming.popleft())
                self._hold(waiting[-1], self._kept_longer(waiting[-1]))
            self._arrivals()
            self._make_room(at, waiting)
            for task in by_need.get(at, ()):
                self._finish(task)
            self._begin(at, self._now + cost, gathers, [task for task in waiting if not self._gives_way(task, place)])
            waiting = [task for task in waiting if not task.has_begun]
            self._written.append(entry)
            self._now += cost
        for task in (*waiting, *coming):
            self._start(task)
        self._update(updates, by_need)
        kept = kept_buffers(self._graph, self._schedule.inputs, self._schedule.results)
        instructions = with_frees(self._written, kept, self._sends_copy)
        return replace(self._schedule, buffers=tuple(self._buffers), instructions=instructions)

    # ---------------------------------------------------------------- plan

    def _task(self, transfer: Transfer) -> _Task:
        reshard = self._schedule.instructions[transfer.reshard]
        assert isinstance(reshard, Reshard)
        steps = single_steps(self._schedule, reshard, len(self._buffers))
        value = self._buffers[reshard.source].value
        self._buffers += [Buffer(value, step.path[1]) for step in steps[:-1]]
        quanta = (self._costs.reshard_quanta(value, step.path) for step in steps)
        return _Task(transfer, transfer.before, deque(steps), deque(quanta))

    def _price(self, entry: Instruction) -> int:
        return instruction_quanta(self._graph, self._schedule, self._costs, entry)

    def _plan_gathers(self, eagerness: float) -> None:
        """Latest begins of gathers, from the last one backwards."""
        place = {at: k for k, at in enumerate(self._kept)}
        latest: dict[int, float] = defaultdict(lambda: float(self._begins[-1]))
        gathers = [task for task in self._tasks if task.transfer.is_gather]
        for task in sorted(gathers, key=lambda task: task.transfer.needed, reverse=True):
            need = float(self._begins[place[task.transfer.needed]])
            ends = min(need, *(latest[_axis(step)] for step in task.steps if step.overlapped))
            begin = self._begin_of(task, ends, eagerness)
            for step in task.steps:
                if step.overlapped:
                    latest[_axis(step)] = begin
            task.begin = int(begin)

    def _begin_of(self, task: _Task, ends: float, eagerness: float) -> float:
        """Begin of a gather that has to end by a time."""
        duration = sum(task.costs)
        latest, earliest = ends - duration, ends - eagerness * duration
        step = task.next_collective
        if not self._give_way or step is None:
            return earliest
        first, last = np.searchsorted(self._begins, (earliest, latest))
        begins = [*self._begins[first:last].tolist(), latest]
        return float(min(reversed(begins), key=lambda begin: self._blocks(_axis(step), begin, begin + duration)))

    # ---------------------------------------------------------------- write

    def _begin(self, at: int, until: int, gathers: deque[_Task], reductions: Sequence[_Task]) -> None:
        """Start what has its time before the computation reaches ``until``, where links are free by then."""
        while gathers and gathers[0].has_begun:
            gathers.popleft()
        for task in gathers:
            if task.begin >= until:
                break
            if not task.has_begun and self._is_free(task, until) and self._reserve(at, task):
                self._start(task)
        for task in reductions:
            if self._is_free(task, until) and self._fits(at, self._held_by(task)):
                self._start(task)

    def _gives_way(self, task: _Task, place: int) -> bool:
        """Whether a reduction would share its link with a resharded activation, and has time to run behind it."""
        step = task.next_collective
        if not self._give_way or step is None:
            return False
        axis, now = _axis(step), self._begins[place]
        if not self._blocks(axis, now, now + sum(task.costs)):
            return False
        return bool(self._left[axis] < self._begins[-1] - now)

    def _blocked(self, axis: int) -> NDArray[np.int64]:
        """Quanta for which resharded activations need the link of an axis before each instruction that is kept."""
        entries = (self._schedule.instructions[at] for at in self._kept)
        costs = [
            cost if isinstance(entry, Reshard) and axis in communicating_axes(entry.path) else 0
            for entry, cost in zip(entries, self._quanta, strict=True)
        ]
        return np.concatenate(([0], np.cumsum(np.array(costs, dtype=np.int64))))

    def _blocks(self, axis: int, begin: float, end: float) -> int:
        """Quanta for which resharded activations that start in a time need the link of an axis."""
        first, last = np.minimum(np.searchsorted(self._begins, (begin, end)), len(self._kept))
        return int(self._blocking[axis][last] - self._blocking[axis][first])

    def _is_free(self, task: _Task, until: int) -> bool:
        step = task.next_collective
        return step is None or self._link[_axis(step)] < until

    def _reserve(self, at: int, task: _Task) -> bool:
        """Reserve the bytes of a gather until it is needed; False where they do not fit."""
        nbytes = max(self._bytes(step.target) for step in task.steps) + self._held_by(task)
        needed, limit = task.transfer.needed, self._room.limit
        if limit is not None:
            most = int((self._room.during[at:needed] + self._extra[at:needed]).max(initial=0))
            if most + self._held() + nbytes > limit:
                return False
        self._extra[at:needed] += nbytes
        return True

    def _fits(self, at: int, nbytes: int) -> bool:
        limit = self._room.limit
        return limit is None or int(self._room.during[at] + self._extra[at]) + self._held() + nbytes <= limit

    def _make_room(self, at: int, waiting: list[_Task]) -> None:
        """Wait for reductions under way, the oldest first, until an instruction fits."""
        for task in list(self._holding.values()):
            if self._fits(at, 0):
                return
            self._finish(task)
            if task in waiting:
                waiting.remove(task)

    def _hold(self, task: _Task, nbytes: int) -> None:
        task.held = nbytes
        if nbytes:
            self._holding[task.transfer.reshard] = task
        else:
            self._holding.pop(task.transfer.reshard, None)

    def _held(self) -> int:
        return sum(task.held for task in self._holding.values())

    def _arrivals(self) -> None:
        """Go on with transfers whose step has ended, where that frees memory or starts the next one."""
        for task in list(self._flying.values()):
            if task.ends <= self._now and (task.held or task.steps):
                self._wait(task)
                if task.steps:
                    self._start(task)

    def _start(self, task: _Task) -> None:
        """Start the next step; local slices before it are done at once."""
        self._written += [self._schedule.instructions[at] for at in task.before]
        task.before = ()
        while task.steps and not task.flying:
            step, cost = task.steps.popleft(), task.costs.popleft()
            self._written.append(step)
            if not step.overlapped:
                self._now += cost
                continue
            axis = _axis(step)
            if not task.transfer.is_gather:
                self._left[axis] -= cost
            task.flying = step
            self._flying[task.transfer.reshard] = task
            task.ends = self._link[axis] = max(self._now, self._link[axis]) + cost
            self._hold(task, 0 if task.transfer.is_gather else self._sent_bytes(step))
        if not task.flying:
            self._end(task)

    def _wait(self, task: _Task) -> None:
        assert task.flying is not None
        self._written.append(Wait(task.flying.target))
        self._now = max(self._now, task.ends)
        task.flying = None
        del self._flying[task.transfer.reshard]
        self._hold(task, 0)
        if not task.steps:
            self._end(task)

    def _end(self, task: _Task) -> None:
        self._written += [self._schedule.instructions[at] for at in task.transfer.behind]
        task.is_done = True

    def _finish(self, task: _Task) -> None:
        """Run a transfer to its end, waiting for it."""
        while not task.is_done:
            if task.flying is None:
                self._start(task)
            if task.flying is not None:
                self._wait(task)

    def _update(self, updates: Sequence[int], by_need: dict[int, list[_Task]]) -> None:
        """Updates in the order in which their gradients arrive."""

        def arrival(at: int) -> tuple[int, int]:
            return max((task.ends for task in by_need.get(at, ()) if not task.is_done), default=0), at

        for at in sorted(updates, key=arrival):
            for task in by_need.get(at, ()):
                self._finish(task)
            self._written.append(self._schedule.instructions[at])

    # ---------------------------------------------------------------- bytes

    def _bytes(self, buffer: int) -> int:
        entry = self._buffers[buffer]
        return self._local_bytes(entry.value, entry.placement)

    def _held_by(self, task: _Task) -> int:
        """Bytes of the next step besides source and target, and the source where it lives on."""
        step = task.next_collective
        return 0 if step is None else self._sent_bytes(step)

    def _kept_longer(self, task: _Task) -> int:
        """Bytes by which the source of a transfer that has not started exceeds its result."""
        return max(0, self._bytes(task.steps[0].source) - self._bytes(task.steps[-1].target))

    def _sent_bytes(self, step: Reshard) -> int:
        """Bytes that a step holds while it runs besides its target: its source, or the copy that it sends."""
        reduced = step.path[1][_axis(step)] == "R" and step.path[0][_axis(step)][0] == "P"
        is_input = step.source in self._schedule.inputs
        return 0 if reduced or (is_input and not self._sends_copy(step)) else self._bytes(step.source)

    def _sends_copy(self, step: Reshard) -> bool:
        (before, after), shapes, _ = self._local_bytes.along(self._buffers[step.source].value, step.path)
        return sends_copy(before, after, shapes[0])


def _axis(step: Reshard) -> int:
    """Mesh axis of a single collective."""
    return communicating_axes(step.path)[0]
