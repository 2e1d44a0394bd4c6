"""Freed memory is kept: buffers of many sizes, made again and again, need few new pages."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import resource
import torch
from runtime.job.allocator import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def last_of_five():
    for _ in range(5):
        start = faults()
        kept = [torch.ones(size << 18) for size in (40, 64, 100)]
        del kept
    return faults() - start

default = last_of_five()
assert keep_freed_memory()
print(default, last_of_five())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_large_buffers_are_made_of_pages_that_were_freed() -> None:
    """Minor page faults of the fifth round of buffers of 40, 64 and 100 MiB, without the setting and with it."""
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=ROOT)
    default, kept = map(int, found.stdout.split())
    assert kept < 0.8 * default
