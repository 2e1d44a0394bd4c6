"""The collector of reference cycles, and where it only costs time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector while very many objects are made that form no cycles.

    They make it look through every object of the process, again and again: beside a traced step each time takes as
    long as building a problem.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
