"""Assignments that other solvers found meanwhile, as the solver of this process sees them.

A worker process has one mailbox. What arrives is the best assignment of someone else, checked by nobody here:
a solver that can use one takes it at its convenience, the others never look.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

Translation = Callable[[tuple[int, ...]], tuple[int, ...] | None]


class Mailbox:
    """Keeps the newest assignment until it is taken; written by one thread, read by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: tuple[int, ...] | None = None
        self._translate: Translation = lambda choices: choices

    def put(self, choices: tuple[int, ...] | None) -> None:
        """Replace what is there; None empties the box."""
        with self._lock:
            self._newest = choices

    def take(self) -> tuple[int, ...] | None:
        """Return the newest assignment and empty the box, or None."""
        with self._lock:
            newest, self._newest = self._newest, None
        return None if newest is None else self._translate(newest)

    @contextlib.contextmanager
    def translated(self, translate: Translation) -> Iterator[None]:
        """Hand out assignments of another problem: ``translate`` makes them from what arrives, None where it cannot."""
        before, self._translate = self._translate, translate
        try:
            yield
        finally:
            self._translate = before


FROM_OTHERS = Mailbox()
"""The mailbox of this process."""
