"""Timetable of offload: when activations are copied to the host, freed, and prefetched.

The copy of an activation to the host may start once it is made, also while forward still reads it; the activation is
freed when the copy is done and forward has read it. Of the copies that may start, the outward link takes the one whose
room is needed first: that of the activation that forward reads last the soonest. A copy never delays the computation.

An activation is prefetched as late as the inward link allows. Links take copies in order, so in a step without
stalls the latest ends of the copies follow from the last one backwards,

    end_k = min(begin of the first backward use of k, end_{k+1} - duration_{k+1}),

and copy k starts at the last instruction that begins by ``end_k - duration_k``. Where copy k cannot start by then
(the link is busy, or the copy to the host is not done) it is exposed: it starts as soon as the link and the
activation are free, and its stall delays the copies behind it. A link that both directions share is not modelled:
then some of these copies wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import OperatorGraph
from planner.machine.cluster import HostCopies
from planner.replay.clocks import StepCosts, instruction_quanta
from planner.schedule.instructions import Schedule
from planner.schedule.storage_uses import StorageUses, behind


@dataclass(frozen=True, slots=True)
class Stay:
    """A storage's stay on the host; positions are those of the instructions before which something is inserted.

    Parameters
    ----------
    owner
        Buffer that owns the storage.
    turn
        Its place in the order of the copies to the host.
    offloaded, freed, prefetched
        Where the offload, the free of the source and the prefetch stand; none is a free.
    left
        Behind its last use in forward: the first position where it may be freed.
    read
        Its first reader in backward.
    """

    owner: int
    turn: int
    offloaded: int
    left: int
    freed: int
    prefetched: int
    read: int


class _Outward(NamedTuple):
    """A copy to the host: its turn, the position of its instruction, and its end in quanta."""

    turn: int
    position: int
    ends: int


class Timetable:
    """Begins of the instructions of a schedule without stalls, and the copies that fit between them.

    Parameters
    ----------
    graph, schedule, uses
        A correct schedule without offload, and the uses of its storages.
    costs
        Prices of instructions and copies.
    """

    def __init__(self, graph: OperatorGraph, schedule: Schedule, uses: StorageUses, costs: StepCosts) -> None:
        self._schedule, self._uses, self._costs = schedule, uses, costs
        own = [instruction_quanta(graph, schedule, costs, entry) for entry in schedule.instructions]
        self._planned = np.concatenate(([0], np.cumsum(np.array(own, dtype=np.int64))))

    def stays(self, owners: Collection[int]) -> list[Stay]:
        """Stays of storages, in the order in which they come back."""
        if self._costs.host_copies is HostCopies.BLOCKING:
            return sorted(map(self._at_once, owners), key=lambda stay: (stay.read, stay.owner))
        outward = self._outward(owners)
        back = sorted(owners, key=lambda owner: (self._uses.first_backward[owner], owner))
        begins = self._planned.copy()
        link = position = 0
        stays = []
        for owner, start in zip(back, self._latest_starts(back), strict=True):
            left, read, copy = self._left(owner), self._uses.first_backward[owner], outward[owner]
            gone = int(np.searchsorted(self._planned, copy.ends))
            freed = min(read, behind(self._schedule, max(left, gone) - 1))
            position = min(read, max(position, freed, _last_by(self._planned, start), _last_by(begins, link)))
            link = max(link, copy.ends, int(begins[position])) + self._duration(owner)
            # The stall of the first reader delays all that follows it.
            begins[read + 1 :] += max(0, link - int(begins[read]))
            stays.append(Stay(owner, copy.turn, copy.position, left, freed, position, read))
        return stays

    def _at_once(self, owner: int) -> Stay:
        """Stay with exposed copies: freed as early and prefetched as late as possible."""
        left, read = self._left(owner), self._uses.first_backward[owner]
        return Stay(owner, left, left, left, left, read, read)

    def _left(self, owner: int) -> int:
        return behind(self._schedule, self._uses.last_forward[owner])

    def _outward(self, owners: Collection[int]) -> dict[int, _Outward]:
        """Copies to the host in the order of their link, which takes none that keeps it waiting."""
        made = sorted((behind(self._schedule, self._uses.creator[owner]), owner) for owner in owners)[::-1]
        ready: list[tuple[int, int]] = []
        order: list[tuple[int, int, int]] = []
        link = position = 0
        while made or ready:
            position = max(position, _last_by(self._planned, link))
            if not ready:
                position = max(position, made[-1][0])
            while made and made[-1][0] <= position:
                owner = made.pop()[1]
                heappush(ready, (self._uses.last_forward[owner], owner))
            owner = heappop(ready)[1]
            link = max(link, int(self._planned[position])) + self._duration(owner, outward=True)
            order.append((owner, position, link))
        # A copy waits for its link no later than forward reads the activation last, so that a stall can free it then.
        found: dict[int, _Outward] = {}
        latest = len(self._schedule.instructions)
        for turn, (owner, position, ends) in reversed(list(enumerate(order))):
            latest = min(latest, position, self._left(owner))
            found[owner] = _Outward(turn, latest, ends)
        return found

    def _latest_starts(self, owners: Sequence[int]) -> list[int]:
        """Latest starts of copies to the device that cause no stall; ``owners`` in their order."""
        starts: list[int] = []
        limit = int(self._planned[-1])
        for owner in reversed(owners):
            limit = min(limit, int(self._planned[self._uses.first_backward[owner]])) - self._duration(owner)
            starts.append(limit)
        return starts[::-1]

    def _duration(self, owner: int, outward: bool = False) -> int:
        entry = self._schedule.buffers[owner]
        return self._costs.transfer_quanta(entry.value, entry.placement, outward)


def _last_by(begins: NDArray[np.int64], time: int) -> int:
    """Last position whose instruction begins by ``time``; -1 if none does."""
    return int(np.searchsorted(begins, time, side="right")) - 1
