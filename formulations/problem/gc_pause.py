"""Pauses of garbage collection while many objects are built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection while very many objects are made that form no cycles.

    Their number triggers full collections, each of which visits every object of the process. With a traced step in
    memory, one collection takes as long as building a problem.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
