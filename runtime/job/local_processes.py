"""Processes of this machine by names that no later process can have."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def own_process() -> str:
    """Name of this process: its machine, its space of process ids, its id and the moment of its start.

    Empty where the system does not tell.
    """
    try:
        return _name_of(os.getpid())
    except OSError:
        return ""


def kill(process: str) -> None:
    """Kill a process by its name; nothing where it is not of this machine, or has ended."""
    with suppress(OSError, ValueError, IndexError):
        identifier = int(process.split()[2])
        if _name_of(identifier) == process:
            os.kill(identifier, signal.SIGKILL)


def busy_seconds() -> float:
    """CPU seconds of this process and of all that it started, those that have ended and that it waited for included."""
    times = os.times()
    ticks = sum(map(_ticks_of, _descendants(os.getpid())))
    return times.user + times.system + times.children_user + times.children_system + ticks / os.sysconf("SC_CLK_TCK")


def thread_busy_seconds(native_id: int) -> float:
    """CPU seconds of a thread of this process; 0 where the system does not tell."""
    with suppress(OSError):
        return sum(map(int, _status_of(f"self/task/{native_id}")[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _descendants(identifier: int) -> list[int]:
    """Ids of the processes that one has started, and of theirs; none where the system does not tell."""
    found: list[int] = []
    for children in Path(f"/proc/{identifier}/task").glob("*/children"):
        with suppress(OSError):  # a thread, or a process, may end meanwhile
            for child in map(int, children.read_text(encoding="utf-8").split()):
                found += [child, *_descendants(child)]
    return found


def _ticks_of(identifier: int) -> int:
    with suppress(OSError):
        return sum(map(int, _status_of(identifier)[11:15]))
    return 0


def _name_of(identifier: int) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    space = os.readlink("/proc/self/ns/pid")
    return f"{boot} {space} {identifier} {_status_of(identifier)[19]}"


def _status_of(identifier: int | str) -> list[str]:
    """Fields of ``/proc/ID/stat`` behind the name, from the third on (proc(5))."""
    return Path(f"/proc/{identifier}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
