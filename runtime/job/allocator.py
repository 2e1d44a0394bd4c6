"""Reuse of large buffers on CPU: glibc keeps freed memory instead of returning it to the operating system.

By default every buffer above 32 MiB is mapped anew at each allocation, and the kernel clears its pages when they are
first written. CUDA's allocator keeps freed memory as well.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of ``mallopt``, as in glibc's ``malloc.h``."""

_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let glibc take buffers of any size from memory that was freed; return whether it does.

    For the whole process from now on. Without glibc nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return all(mallopt(name, value) == 1 for name, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER)))
