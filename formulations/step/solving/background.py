"""Work in a thread beside the caller's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

_Result = TypeVar("_Result")


class Background:
    """A thread for one piece of work; use it in a ``with`` block, which stops the work and waits for its end.

    Attributes
    ----------
    stop
        Set when the work should end.
    go
        Set when the work may begin.
    """

    def __init__(self) -> None:
        self.stop, self.go = threading.Event(), threading.Event()
        self._executor = ThreadPoolExecutor(1)

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Begin a piece of work."""
        return self._executor.submit(work)

    def end(self) -> None:
        """Stop the work, also where it waits for its turn."""
        self.stop.set()
        self.go.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        with contextlib.suppress(KeyboardInterrupt):  # the caller's result is there, and the work ends in a moment
            self._executor.shutdown()
