"""Allocations of torch's allocator on the CPU, as its profiler records them: those of generated code too."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch.profiler import profile

_ALLOCATION = "[memory]"


def most_allocated(profiler: profile) -> int:
    """Most bytes, beyond those at its start, that were allocated while a profiler with ``profile_memory`` ran."""
    inner: Any = profiler.profiler
    changes = [
        (event.start_ns(), event.nbytes()) for event in inner.kineto_results.events() if event.name() == _ALLOCATION
    ]
    most: int = max(0, *accumulate(change for _, change in sorted(changes)), 0)
    return most
