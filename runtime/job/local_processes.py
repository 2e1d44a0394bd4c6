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


def _name_of(identifier: int) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    space = os.readlink("/proc/self/ns/pid")
    started = Path(f"/proc/{identifier}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"{boot} {space} {identifier} {started}"
