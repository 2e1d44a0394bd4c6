"""Check that a schedule frees its buffers where the lowered graph does, at their last use.

The generated code of an fx graph drops every value right after its last use. The replay counts bytes by
the schedule's own :class:`Free` instructions. Only where the two agree is the predicted peak that of the
code that runs. A :class:`Free` of a buffer that a copy between device and host still uses is a use itself: the
graph waits there for the copy. So such a buffer may be freed at any time after its last reader. The wait for an
overlapped collective is a use of its source where that still exists. A bucket reads all its sources with its last part.
"""

from __future__ import annotations

from planner.schedule.instructions import (
    Free,
    Offload,
    Prefetch,
    Reshard,
    Schedule,
    Update,
    Wait,
    bucket_ends,
    creates,
    host_buffers,
    reads,
)


class ScheduleError(ValueError):
    """A schedule that cannot be run as it is written."""


def check_schedule(schedule: Schedule, mesh: tuple[int, ...]) -> None:
    """Refuse a schedule that the executor cannot run on ``mesh`` exactly as the replay counts it.

    Raises
    ------
    ScheduleError
        For another mesh; for a buffer that is read before it is made or after it was freed, made twice, freed
        too late, or never freed though nothing keeps it; for a host buffer that anything but a prefetch reads,
        and a prefetch of anything else; for a computation or copy after the first optimizer update.
    """
    if schedule.mesh != mesh:
        raise ScheduleError(f"the schedule is for mesh {schedule.mesh}, the job has mesh {mesh}: start it on that mesh")
    alive = set(schedule.inputs)
    on_host = host_buffers(schedule.instructions)
    copied: set[int] = set()
    last_use: dict[int, int] = {}
    latest_work = -1
    sources: dict[int, int] = {}
    updating = False
    ends = bucket_ends(schedule.instructions)
    for position, instruction in enumerate(schedule.instructions):
        for buffer in reads(instruction):
            if buffer not in alive:
                raise ScheduleError(
                    f"instruction {position} ({instruction}) reads buffer {buffer}, which does not exist"
                )
            if not isinstance(instruction, Free) and isinstance(instruction, Prefetch) != (buffer in on_host):
                where = "is in host memory: prefetch it" if buffer in on_host else "was never offloaded"
                raise ScheduleError(f"instruction {position} ({instruction}) reads buffer {buffer}, which {where}")
        if isinstance(instruction, Free):
            for buffer in instruction.buffers:
                if buffer not in copied and last_use.get(buffer, -1) < latest_work:
                    raise ScheduleError(
                        f"instruction {position} frees buffer {buffer} after instruction {latest_work}, but its last "
                        f"use is instruction {last_use.get(buffer, 'none')}: free it there"
                    )
                alive.remove(buffer)
            continue
        if updating and isinstance(instruction, (Offload, Prefetch)):
            raise ScheduleError(f"instruction {position} ({instruction}) comes after an update: updates come last")
        updating |= isinstance(instruction, Update)
        if isinstance(instruction, Reshard) and instruction.overlapped:
            sources[instruction.target] = instruction.source
        if isinstance(instruction, Wait) and sources.get(instruction.buffer) in alive:
            last_use[sources[instruction.buffer]] = position
        for buffer in creates(instruction):
            if buffer in alive or buffer in last_use:
                raise ScheduleError(f"instruction {position} ({instruction}) makes buffer {buffer} a second time")
            alive.add(buffer)
        if isinstance(instruction, (Offload, Prefetch)):
            copied |= {instruction.source, instruction.target}
        for buffer in (*reads(instruction), *creates(instruction)):
            last_use[buffer] = ends.get(position, position)
        latest_work = position
    left = alive - {*schedule.inputs, *schedule.results}
    if left:
        raise ScheduleError(
            f"buffers {sorted(left)[:10]} are never freed and are no results: free them at their last use"
        )
