"""Timetable of offload: when activations are copied to the host, freed, and prefetched.

The copy of an activation to the host starts right behind its last use in forward; the activation is freed when the
copy is done. It is prefetched as late as the inward link allows. Links take copies in order, so in a step without
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
    offloaded, freed, prefetched
        Where the offload, the free of the source and the prefetch stand; none is a free.
    read
        Its first reader in backward.
    """

    owner: int
    offloaded: int
    freed: int
    prefetched: int
    read: int


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
        left = self._ends_outward(owners)
        back = sorted(owners, key=lambda owner: (self._uses.first_backward[owner], owner))
        begins = self._planned.copy()
        link = position = 0
        stays = []
        for owner, start in zip(back, self._latest_starts(back), strict=True):
            leaves, read = self._leaves(owner), self._uses.first_backward[owner]
            gone = int(np.searchsorted(self._planned, left[owner]))
            freed = min(read, behind(self._schedule, max(leaves, gone) - 1))
            position = min(read, max(position, freed, _last_by(self._planned, start), _last_by(begins, link)))
            link = max(link, left[owner], int(begins[position])) + self._duration(owner)
            # The stall of the first reader delays all that follows it.
            begins[read + 1 :] += max(0, link - int(begins[read]))
            stays.append(Stay(owner, leaves, freed, position, read))
        return stays

    def _at_once(self, owner: int) -> Stay:
        """Stay with exposed copies: freed as early and prefetched as late as possible."""
        leaves, read = self._leaves(owner), self._uses.first_backward[owner]
        return Stay(owner, leaves, leaves, read, read)

    def _leaves(self, owner: int) -> int:
        return behind(self._schedule, self._uses.last_forward[owner])

    def _ends_outward(self, owners: Collection[int]) -> dict[int, int]:
        """Ends of the copies to the host."""
        ends, link = {}, 0
        for owner in sorted(owners, key=lambda owner: (self._uses.last_forward[owner], owner)):
            link = max(link, int(self._planned[self._leaves(owner)])) + self._duration(owner, outward=True)
            ends[owner] = link
        return ends

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
