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
- Transfers of a bucket (:mod:`planner.overlap.buckets`) are one, which is needed when the first of them is.

The clocks do not know what streams take from each other. So the replay judges the result (:mod:`planner.overlap.best`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.overlap.buckets import Bucket, BucketRule, TransferStep
from planner.overlap.serial import SerialSchedule
from planner.overlap.transfers import Transfer
from planner.replay.structure import communicating_axes
from planner.schedule.frees import with_frees
from planner.schedule.instructions import (
    Instruction,
    Reshard,
    Schedule,
    Update,
    Wait,
    sends_copy,
)
from planner.scheduling.builder import kept_buffers

APART = BucketRule(0.0)
"""No buckets."""


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Memory of the serial schedule: bytes during each instruction, and the limit (None for no limit)."""

    during: NDArray[np.int64]
    limit: int | None


@dataclass(slots=True, eq=False)
class _Task:
    """Transfers of a bucket being written, often a single one.

    Parameters
    ----------
    transfers
        The transfers.
    before
        Positions of the views that lead to their sources, until they are written.
    steps
        Steps that have not started.
    coming
        Reductions whose gradients are not there.
    held
        Bytes by which it now holds more than the serial schedule does.
    flying, ends
        The step under way, and its end.
    """

    transfers: tuple[Transfer, ...]
    before: tuple[int, ...]
    steps: deque[TransferStep]
    coming: int
    begin: int = 0
    held: int = 0
    flying: TransferStep | None = None
    ends: int = 0
    is_done: bool = False

    @classmethod
    def of(cls, bucket: Bucket) -> _Task:
        """The task of a bucket."""
        before = tuple(at for transfer in bucket.transfers for at in transfer.before)
        coming = sum(not transfer.is_gather for transfer in bucket.transfers)
        return cls(bucket.transfers, before, deque(bucket.steps), coming)

    @property
    def is_gather(self) -> bool:
        """Whether it gathers inputs, else it reduces gradients."""
        return self.transfers[0].is_gather

    @property
    def needed(self) -> int:
        """Position of the first instruction that reads a result."""
        return min(transfer.needed for transfer in self.transfers)

    @property
    def has_begun(self) -> bool:
        """Whether a step is under way or all are done."""
        return self.flying is not None or self.is_done

    @property
    def next_collective(self) -> TransferStep | None:
        """The next step that communicates."""
        return next((step for step in self.steps if step.parts[0].overlapped), None)


def overlapped(
    serial: SerialSchedule,
    room: Room,
    eagerness: float = 1.0,
    *,
    give_way: bool = False,
    rule: BucketRule = APART,
) -> Schedule:
    """The schedule with its transfers beside the computation.

    Parameters
    ----------
    serial
        The schedule without overlap.
    room
        Memory of it.
    eagerness
        How many times its duration a gather starts before it is needed, at most where it gives way.
    give_way
        Whether transfers give way to resharded activations.
    rule
        Which transfers share their collectives.
    """
    return _Timetable(serial, room, eagerness, give_way, rule).write()


class _Timetable:
    def __init__(self, serial: SerialSchedule, room: Room, eagerness: float, give_way: bool, rule: BucketRule) -> None:
        self._serial, self._schedule, self._room = serial, serial.schedule, room
        self._local_bytes, self._kept, self._quanta = serial.local_bytes, serial.kept, serial.quanta
        self._begins, self._buffers = serial.begins, serial.grouping.buffers
        self._give_way = give_way
        self._written: list[Instruction] = []
        self._now = 0
        self._link: dict[int, int] = defaultdict(int)
        self._flying: dict[int, _Task] = {}
        """Transfers under way, and those that hold bytes while they wait, by position of the first."""
        self._holding: dict[int, _Task] = {}
        self._tasks = sorted(map(_Task.of, serial.buckets(rule)), key=lambda task: _ready(task.transfers))
        self._extra = np.zeros(len(self._schedule.instructions) + 1, dtype=np.int64)
        self._left: dict[int, int] = defaultdict(int)
        """Quanta of reductions that have not started, by axis."""
        for task in self._tasks:
            if not task.is_gather:
                for step in task.steps:
                    if step.parts[0].overlapped:
                        self._left[_axis(step)] += step.quanta
        self._plan_gathers(eagerness)

    def write(self) -> Schedule:
        gathers = deque(task for task in self._tasks if task.is_gather)
        reductions = [(transfer.reshard, task) for task in self._tasks for transfer in task.transfers if task.coming]
        coming = deque(sorted(reductions, key=lambda pair: pair[0]))
        by_need: dict[int, list[_Task]] = defaultdict(list)
        for task in self._tasks:
            for needed in dict.fromkeys(transfer.needed for transfer in task.transfers):
                by_need[needed].append(task)
        waiting: list[_Task] = []
        updates: list[int] = []
        for place, (at, cost) in enumerate(zip(self._kept, self._quanta, strict=True)):
            entry = self._schedule.instructions[at]
            if isinstance(entry, Update):
                updates.append(at)
                continue
            while coming and coming[0][0] < at:
                made, task = coming.popleft()
                task.coming -= 1
                self._hold(task, task.held + self._kept_longer(made))
                if not task.coming:
                    waiting.append(task)
            self._arrivals()
            self._make_room(at, waiting)
            for task in by_need.get(at, ()):
                self._finish(task)
            self._begin(at, self._now + cost, gathers, [task for task in waiting if not self._gives_way(task, place)])
            waiting = [task for task in waiting if not task.has_begun]
            self._written.append(entry)
            self._now += cost
        for task in dict.fromkeys((*waiting, *(task for _, task in coming))):
            self._start(task)
        self._update(updates, by_need)
        kept = kept_buffers(self._serial.graph, self._schedule.inputs, self._schedule.results)
        instructions = with_frees(self._written, kept, self._sends_copy)
        return replace(self._schedule, buffers=tuple(self._buffers), instructions=instructions)

    # ---------------------------------------------------------------- plan

    def _plan_gathers(self, eagerness: float) -> None:
        """Latest begins of gathers, from the last one backwards."""
        place = {at: k for k, at in enumerate(self._kept)}
        latest: dict[int, float] = defaultdict(lambda: float(self._begins[-1]))
        gathers = [task for task in self._tasks if task.is_gather]
        for task in sorted(gathers, key=lambda task: task.needed, reverse=True):
            need = float(self._begins[place[task.needed]])
            ends = min(need, *(latest[_axis(step)] for step in task.steps if step.parts[0].overlapped))
            begin = self._begin_of(task, ends, eagerness)
            for step in task.steps:
                if step.parts[0].overlapped:
                    latest[_axis(step)] = begin
            task.begin = int(begin)

    def _begin_of(self, task: _Task, ends: float, eagerness: float) -> float:
        """Begin of a gather that has to end by a time."""
        duration = sum(step.total for step in task.steps)
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
        if not self._blocks(axis, now, now + sum(step.total for step in task.steps)):
            return False
        return bool(self._left[axis] < self._begins[-1] - now)

    def _blocks(self, axis: int, begin: float, end: float) -> int:
        """Quanta for which resharded activations that start in a time need the link of an axis."""
        first, last = np.minimum(np.searchsorted(self._begins, (begin, end)), len(self._kept))
        return int(self._serial.blocking[axis][last] - self._serial.blocking[axis][first])

    def _is_free(self, task: _Task, until: int) -> bool:
        step = task.next_collective
        return step is None or self._link[_axis(step)] < until

    def _reserve(self, at: int, task: _Task) -> bool:
        """Reserve the bytes of a gather until it is needed; False where they do not fit."""
        received = [sum(self._bytes(part.target) for part in step.parts) for step in task.steps]
        needed, limit = task.needed, self._room.limit
        last = max(transfer.needed for transfer in task.transfers)
        more = np.zeros(last - at, dtype=np.int64)
        more[: needed - at] = max(received) + self._held_by(task)
        for transfer, part in zip(task.transfers, task.steps[-1].parts, strict=True):
            more[needed - at : transfer.needed - at] += self._bytes(part.target)
        if last > needed:
            more[needed - at - 1] += received[-1]  # copied out of the bucket
        if limit is not None:
            most = int((self._room.during[at:last] + self._extra[at:last] + more).max(initial=0))
            if most + self._held() > limit:
                return False
        self._extra[at:last] += more
        return True

    def _fits(self, at: int, nbytes: int) -> bool:
        limit = self._room.limit
        return limit is None or int(self._room.during[at] + self._extra[at]) + self._held() + nbytes <= limit

    def _make_room(self, at: int, waiting: list[_Task]) -> None:
        """Wait for reductions under way, the oldest first, until an instruction fits."""
        for task in list(self._holding.values()):
            if self._fits(at, 0):
                return
            if task.coming:
                continue
            self._finish(task)
            if task in waiting:
                waiting.remove(task)

    def _hold(self, task: _Task, nbytes: int) -> None:
        task.held = nbytes
        if nbytes:
            self._holding[task.transfers[0].reshard] = task
        else:
            self._holding.pop(task.transfers[0].reshard, None)

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
            step = task.steps.popleft()
            self._written += step.parts
            self._now += step.packed
            if not step.parts[0].overlapped:
                self._now += step.quanta
                continue
            axis = _axis(step)
            if not task.is_gather:
                self._left[axis] -= step.quanta
            task.flying = step
            self._flying[task.transfers[0].reshard] = task
            task.ends = self._link[axis] = max(self._now, self._link[axis]) + step.quanta
            self._hold(task, 0 if task.is_gather else self._sent_bytes(step))
        if not task.flying:
            self._end(task)

    def _wait(self, task: _Task) -> None:
        assert task.flying is not None
        self._written += [Wait(part.target) for part in task.flying.parts]
        self._now = max(self._now, task.ends) + task.flying.unpacked
        task.flying = None
        del self._flying[task.transfers[0].reshard]
        self._hold(task, 0)
        if not task.steps:
            self._end(task)

    def _end(self, task: _Task) -> None:
        behind = (at for transfer in task.transfers for at in transfer.behind)
        self._written += [self._schedule.instructions[at] for at in behind]
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

    def _kept_longer(self, at: int) -> int:
        """Bytes by which the source of a transfer that has not started exceeds its result."""
        reshard = self._schedule.instructions[at]
        assert isinstance(reshard, Reshard)
        return max(0, self._bytes(reshard.source) - self._bytes(reshard.target))

    def _sent_bytes(self, step: TransferStep) -> int:
        """Bytes that a step holds while it runs besides its target: its sources, or the copies that it sends."""
        (first, *more), axis = step.parts, _axis(step)
        reduced = first.path[1][axis] == "R" and first.path[0][axis][0] == "P"
        is_input = first.source in self._schedule.inputs and not more
        if reduced or (is_input and not self._sends_copy(first)):
            return 0
        return sum(self._bytes(part.source) for part in step.parts)

    def _sends_copy(self, step: Reshard) -> bool:
        (before, after), shapes, _ = self._local_bytes.along(self._buffers[step.source].value, step.path)
        return sends_copy(before, after, shapes[0])


def _axis(step: TransferStep) -> int:
    """Mesh axis of a single collective."""
    return communicating_axes(step.parts[0].path)[0]


def _ready(transfers: Sequence[Transfer]) -> int:
    """Position in the serial schedule of the first of several gathers, or of the last of several reductions."""
    pick = min if transfers[0].is_gather else max
    return pick(transfer.reshard for transfer in transfers)
