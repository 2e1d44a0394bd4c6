"""Streams of a step: the computation, the links to the host, and overlapped collectives of each mesh axis.

The rules of waiting are those of :mod:`planner.schedule.instructions`. What runs at once shares:

- A collective that is not overlapped, and an overlapped one of the same axis, have half of the link each.
- The computation and overlapped collectives slow each other down by the factors of the cluster
  (:class:`planner.machine.cluster.OverlapSpec`), while both run.

Overlapped collectives of one axis have their link without a break, from the first to the last that is queued. Times
are whole quanta and are rounded up, so that a schedule's time is the same wherever it is replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.machine.cluster import HostCopies
from planner.replay.memory import LocalBytes
from planner.replay.structure import communicating_axes
from planner.schedule.instructions import Free, Instruction, Offload, Prefetch, Reshard, Schedule, Wait, buckets, reads

WHOLE = 1000
"""Slowdowns are in thousandths: 1000 is none."""

_SHARED = 2 * WHOLE


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """How much longer the computation takes beside overlapped collectives, and these beside it, in thousandths."""

    computation: int = WHOLE
    collectives: int = WHOLE


class StreamCosts(Protocol):
    """What the streams of a cluster do at once."""

    @property
    def host_copies(self) -> HostCopies:
        """Concurrency of copies between device and host."""

    @property
    def slowdowns(self) -> Slowdowns:
        """Slowdowns of the computation and of overlapped collectives beside each other."""


@dataclass(frozen=True, slots=True)
class BesideInterval:
    """A copy or an overlapped collective on its link.

    Parameters
    ----------
    instruction
        Position of the instruction that starts it.
    link
        Its mesh axis, or ``OUTWARD`` or ``INWARD`` for a copy to or from the host.
    start, end
        Quanta since the start of the step.
    """

    instruction: int
    link: int
    start: int
    end: int


OUTWARD, INWARD = -1, -2
"""Links to the host, beside those of mesh axes, which are numbered from 0."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one step on a device.

    Parameters
    ----------
    total
        Quanta from the first instruction to the end of the last.
    durations
        Quanta of each instruction on the compute stream; they add up to ``total``.
    stalled
        Quanta in which the computation was stalled by copies between device and host.
    hidden_bytes
        Bytes of these copies, both ways, that caused no stall.
    overlapped, exposed
        Quanta that overlapped collectives take by themselves, and in which the computation waited for them.
    beside
        Copies and overlapped collectives, in the order in which their instructions are reached.
    """

    total: int
    durations: tuple[int, ...]
    stalled: int
    hidden_bytes: int
    overlapped: int
    exposed: int
    beside: tuple[BesideInterval, ...] = ()


@dataclass(slots=True)
class _Copy:
    """A copy between device and host: its end, its bytes, and whether it caused a stall."""

    ends: int
    nbytes: int
    exposed: bool


class Streams:
    """The clock of the computation, those of the links to the host, and those of the mesh axes.

    Parameters
    ----------
    schedule
        A correct schedule.
    costs
        What streams do at once.
    local_bytes
        Bytes of values on one device.
    """

    def __init__(self, schedule: Schedule, costs: StreamCosts, local_bytes: LocalBytes) -> None:
        self._schedule = schedule
        self._costs = costs
        self._local_bytes = local_bytes
        self._now = 0
        self._stalled = self._overlapped = self._exposed = 0
        self._link = {True: 0, False: 0}
        """Ends of the last copies, by whether they lead outward."""
        self._copies: list[_Copy] = []
        self._using: dict[int, list[_Copy]] = defaultdict(list)
        """Copies that read or write a buffer."""
        self._filling: dict[int, _Copy] = {}
        """The copy that writes a buffer."""
        self._flying: dict[int, dict[int, int]] = defaultdict(dict)
        """By mesh axis, the ends of its overlapped collectives by target, in their order."""
        self._axis: dict[int, int] = {}
        """Mesh axis of an overlapped collective by its target."""
        self._last = {
            part.target: last.target
            for *parts, last in buckets(schedule.instructions).values()
            for part in (*parts, last)
        }
        """Target of the last part by that of each part of a bucket."""
        self._started: list[tuple[int, int, int, int]] = []
        """Instruction, link, target and earliest start of copies and overlapped collectives."""
        self._ended: dict[int, int] = {}
        """Their ends by target, once these are final."""

    def run(self, quanta: Sequence[int], copies: Mapping[int, int]) -> StepTime:
        """Run the instructions.

        Parameters
        ----------
        quanta
            Cost of each.
        copies
            Quanta of copies into and out of the flat buffers of buckets, by position of the instruction.
        """
        durations = []
        for at, (instruction, cost) in enumerate(zip(self._schedule.instructions, quanta, strict=True)):
            begun = self._now
            copied = copies.get(at, 0)
            if copied and isinstance(instruction, Reshard):
                self._compute(copied, set())
            self._take(instruction, cost)
            if copied and isinstance(instruction, Wait):
                self._compute(copied, set())
            durations.append(self._now - begun)
            match instruction:
                case Offload(_, target):
                    self._started.append((at, OUTWARD, target, self._filling[target].ends - cost))
                case Prefetch(_, target):
                    self._started.append((at, INWARD, target, self._filling[target].ends - cost))
                case Reshard(_, target, path, overlapped) if overlapped:
                    self._started.append((at, communicating_axes(path)[0], target, self._now))
        hidden = sum(copy.nbytes for copy in self._copies if not copy.exposed)
        return StepTime(
            self._now,
            tuple(durations),
            self._stalled,
            hidden,
            self._overlapped,
            self._exposed,
            tuple(self._intervals()),
        )

    def _intervals(self) -> Iterator[BesideInterval]:
        """Intervals on the links; each link takes one after another, so each starts when the one before has ended."""
        free: dict[int, int] = defaultdict(int)
        for at, link, target, earliest in self._started:
            end = self._filling[target].ends if target in self._filling else self._ended[target]
            start = max(earliest, free[link])
            free[link] = end
            yield BesideInterval(at, link, start, end)

    def _take(self, instruction: Instruction, cost: int) -> None:
        match instruction:
            case Offload(source, target) | Prefetch(source, target):
                self._copy(source, target, cost, outward=isinstance(instruction, Offload))
                return
            case Free(buffers):
                for buffer in buffers:
                    for copy in self._using.pop(buffer, ()):
                        self._wait_for(copy)
                return
            case Wait(buffer):
                self._arrive(buffer)
                return
        for buffer in reads(instruction):
            if buffer in self._filling:
                self._wait_for(self._filling[buffer])
        match instruction:
            case Reshard(_, target, path, overlapped) if overlapped:
                self._fly(target, communicating_axes(path)[0], cost)
            case Reshard(_, _, path):
                self._compute(cost, set(communicating_axes(path)))
            case _:
                self._compute(cost, set())

    # ---------------------------------------------------------- collectives

    def _fly(self, target: int, axis: int, cost: int) -> None:
        """Queue an overlapped collective."""
        flying = self._flying[axis]
        flying[target] = max([self._now, *flying.values()]) + cost
        self._axis[target] = axis
        self._overlapped += cost

    def _arrive(self, target: int) -> None:
        """Let the computation wait for an overlapped collective; it takes nothing from the links meanwhile."""
        axis = self._axis.pop(target)
        flying = self._flying[axis]
        wait = flying[self._last.get(target, target)] - self._now
        self._ended[target] = flying.pop(target)
        if wait > 0:
            self._now += wait
            self._exposed += wait

    def _compute(self, cost: int, axes: set[int]) -> None:
        """Run an instruction of the compute stream that communicates on some axes, beside what flies."""
        begun, duration = self._now, cost
        delays: list[tuple[dict[int, int], int, int]] = []
        for axis, flying in self._flying.items():
            left = max(flying.values(), default=begun) - begun
            if left <= 0:
                continue
            slowdowns = self._costs.slowdowns
            own, other = slowdowns.computation, slowdowns.collectives
            if axis in axes:
                own = other = _SHARED
            elif axes:
                continue  # two links, and no computation
            if own == other == WHOLE:
                continue
            taken, delay = _beside(cost, left, own, other)
            duration = max(duration, taken)
            delays.append((flying, delay, other))
        for flying, delay, other in delays:
            for target, ends in flying.items():
                if ends > begun:
                    flying[target] = ends + min(delay, _part(ends - begun, other - WHOLE))
        self._now += duration

    # --------------------------------------------------------------- copies

    def _copy(self, source: int, target: int, cost: int, outward: bool) -> None:
        way = self._costs.host_copies
        link = outward or way is HostCopies.TAKE_TURNS
        starts = max(self._now, self._link[link])
        if source in self._filling:
            starts = max(starts, self._filling[source].ends)
        entry = self._schedule.buffers[source]
        copy = _Copy(starts + cost, self._local_bytes(entry.value, entry.placement), exposed=False)
        self._link[link] = copy.ends
        self._copies.append(copy)
        self._using[source].append(copy)
        self._using[target].append(copy)
        self._filling[target] = copy
        if way is HostCopies.BLOCKING:
            self._wait_for(copy)

    def _wait_for(self, copy: _Copy) -> None:
        wait = copy.ends - self._now
        if wait > 0:
            self._now += wait
            self._stalled += wait
            copy.exposed = True


def _beside(cost: int, left: int, own: int, other: int) -> tuple[int, int]:
    """Duration of ``cost`` beside a queue with ``left`` to do, and the delay of the queue; slowdowns in thousandths."""
    if cost * own <= left * other:
        duration = _part(cost, own)
        return duration, duration - duration * WHOLE // other
    both = _part(left, other)
    return both + cost - both * WHOLE // own, both - left


def _part(amount: int, thousandths: int) -> int:
    """An amount times so many thousandths, rounded up."""
    return -(-amount * thousandths // WHOLE)
