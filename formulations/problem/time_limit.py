"""The end of a search in this process: its deadline, or the first Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_interrupted = threading.Event()
_noticing: list[threading.Event] = []
"""Events of the present :func:`noticing_interrupts`, the innermost last."""


def is_over(deadline: float) -> bool:
    """Whether a deadline of the monotonic clock has passed, or Ctrl-C ended the searches of :func:`interruptible`."""
    return time.monotonic() >= deadline or _interrupted.is_set()


def was_interrupted() -> bool:
    """Whether Ctrl-C ended the searches of the present :func:`interruptible`."""
    return _interrupted.is_set()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the first Ctrl-C end the searches inside as their deadline does, with what they have found; a second raises.

    Only the main thread gets signals; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.getsignal(signal.SIGINT)

    def end(number: int, frame: FrameType | None) -> None:
        for event in (_interrupted, *_noticing):
            event.set()
        signal.signal(signal.SIGINT, former)

    _interrupted.clear()
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        _interrupted.clear()


@contextmanager
def noticing_interrupts() -> Iterator[threading.Event]:
    """Set the event when Ctrl-C is pressed, because a solve then returns its best result without an error.

    So it is also where :func:`interruptible` searches inside end by it.

    Only the main thread may set handlers and receives Ctrl-C; elsewhere nothing is changed.
    """
    noticed = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield noticed
        return

    def notice(number: int, frame: FrameType | None) -> None:
        noticed.set()
        before(number, frame)

    signal.signal(signal.SIGINT, notice)
    _noticing.append(noticed)
    try:
        yield noticed
    finally:
        _noticing.remove(noticed)
        signal.signal(signal.SIGINT, before)
