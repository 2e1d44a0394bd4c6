"""Offload under a memory limit: activations are freed earlier and prefetched later, at the price of stalls.

Over the instructions of the schedule without offload, an offloaded storage is away from the device from the
position of its free up to that of its prefetch. Wherever memory is above the limit, these intervals are extended to
cover the instruction. First come storages whose copy to the host still runs, in the order of the outward link: a
stall for one copy also covers the earlier ones. Then come storages that are prefetched already but read later, the
one read last first, which keeps the order of the inward link.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.replay.memory import LocalBytes
from planner.schedule.instructions import Free, Schedule
from planner.schedule.storage_uses import behind
from planner.scheduling.offload_timetable import Stay


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLimit:
    """Limit on device memory for offload.

    Parameters
    ----------
    during
        (instructions,) bytes that the schedule without offload holds while each of its instructions runs:
        ``profile.total_during`` of its replay.
    limit
        Bytes.
    """

    during: NDArray[np.int64]
    limit: int


def stays_below(limit: DeviceLimit, schedule: Schedule, stays: list[Stay], local_bytes: LocalBytes) -> list[Stay]:
    """Extend stays until no instruction needs more than the limit, or no stay can be extended.

    Parameters
    ----------
    limit
        The limit, and the memory of the schedule without offload.
    schedule
        The schedule without offload.
    stays
        Stays of its storages on the host.
    local_bytes
        Bytes of values on one device.

    Returns
    -------
    list of Stay
        In the order of ``stays``.
    """
    sizes = [local_bytes(entry.value, entry.placement) for stay in stays for entry in (schedule.buffers[stay.owner],)]
    held = limit.during.copy()
    for stay, size in zip(stays, sizes, strict=True):
        held[stay.freed : stay.prefetched] -= size
    stays = list(stays)
    leaving = sorted(range(len(stays)), key=lambda k: stays[k].turn)
    for at in np.flatnonzero(held > limit.limit).tolist():
        if held[at] <= limit.limit or isinstance(schedule.instructions[at], Free):
            continue  # a free holds no more than the instruction before it
        for k in leaving:
            if held[at] > limit.limit and max(stays[k].offloaded, stays[k].left) <= at < stays[k].freed:
                held[at : stays[k].freed] -= sizes[k]
                stays[k] = replace(stays[k], freed=at)
        for k in reversed(range(len(stays))):
            if held[at] > limit.limit and stays[k].prefetched <= at < stays[k].read:
                back = behind(schedule, at)
                held[stays[k].prefetched : back] -= sizes[k]
                stays[k] = replace(stays[k], prefetched=back)
    return stays
