"""Since when a thread does nothing: it neither moves in its code, nor waits for other ranks, nor uses a processor."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

IDLE_SHARE = 0.05
"""A thread that uses less of one processor does nothing; the watchdog itself uses some."""
NOISE_SECONDS = 0.1
"""CPU seconds that are no sign of work, however short the time."""
_WAITS_IN = ("torch/distributed/", "torch_adapter/local/collectives.py")
_WRITES_IN = "torch/distributed/checkpoint/"
"""Where torch writes checkpoints; its collectives are outside of it."""
_INNERMOST = 4
"""Frames among which a file of :data:`_WAITS_IN` means that a thread waits for other ranks."""


class Stillness:
    """How long a thread has done nothing, from looks at it every now and then.

    Parameters
    ----------
    thread
        Its identifier, as :func:`threading.get_ident` gives it.
    busy
        CPU seconds so far: of the thread, or of all that works for it.

    Attributes
    ----------
    at
        File, line and function where it was seen last, outside of torch.
    waits
        Whether it was in a collective.
    idle
        Seconds for which it has done nothing.
    """

    def __init__(self, thread: int, busy: Callable[[], float]) -> None:
        self._thread, self._busy = thread, busy
        self.at, self.waits, self.idle = "", False, 0.0
        self._seen: tuple[object, ...] = ()
        self._since: float | None = None
        self._busy_since = 0.0

    def look(self, progress: int, waits: bool, now: float) -> None:
        """Look where the thread is.

        Parameters
        ----------
        progress
            Number that changes with each piece of work that the thread itself reports.
        waits
            Whether the thread has said that it waits.
        now
            Seconds of any clock.
        """
        frame = sys._current_frames().get(self._thread)
        self.at, in_collective = where(frame)
        self.waits = waits or in_collective
        seen = (progress, *((entry.f_code, line) for entry, line in traceback.walk_stack(frame)))
        if self.waits or seen != self._seen:
            self._seen, self._since, self.idle = seen, None, 0.0
            return
        busy = self._busy()
        if self._since is None or busy - self._busy_since > max(NOISE_SECONDS, IDLE_SHARE * (now - self._since)):
            self._since, self._busy_since = now, busy
        self.idle = now - self._since


def where(frame: FrameType | None) -> tuple[str, bool]:
    """Innermost place outside of torch, and whether the thread waits for other ranks."""
    waits, at = False, ""
    for depth, (entry, line) in enumerate(traceback.walk_stack(frame)):
        name = entry.f_code.co_filename
        waits = waits or (depth < _INNERMOST and _WRITES_IN not in name and any(part in name for part in _WAITS_IN))
        if not at and f"{os.sep}torch{os.sep}" not in name:
            waits = waits or _WAITS_IN[1] in name  # between it and the wait are torch's own frames
            at = f"{Path(name).name}:{line} in {entry.f_code.co_name}"
    return at or "torch", waits
