"""Allocations of torch's allocator on the CPU, as its profiler records them: those of generated code too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

_ALLOCATION = "memory_alloc"
_torch: Any = torch._C


def most_allocated(run: Callable[[], object]) -> int:
    """Most bytes, beyond those at its start, that are allocated while a function runs.

    Parameters
    ----------
    run
        The function; what it returns is alive until the recording ends.

    Raises
    ------
    RuntimeError
        A profiler is on in this thread.

    Notes
    -----
    The recorder is the older one of torch's two, because one of the newer kind cannot run inside another, not even in
    another thread, and because it writes to stderr.
    """
    options = (False, True, False, False, False)  # of shapes, memory, stacks, FLOPs and modules
    autograd, profiler = _torch._autograd, _torch._profiler
    config = profiler.ProfilerConfig(profiler.ProfilerState.CPU, *options, profiler._ExperimentalConfig())
    autograd._enable_profiler_legacy(config)
    try:
        result = run()
    finally:
        threads = autograd._disable_profiler_legacy()
    del result
    start = threads[0][0]
    changes = [
        (start.cpu_elapsed_us(event), event.cpu_memory_usage())
        for events in threads
        for event in events
        if event.kind() == _ALLOCATION
    ]
    most: int = max(0, *accumulate(change for _, change in sorted(changes, key=lambda change: change[0])), 0)
    return most
