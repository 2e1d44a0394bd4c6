"""What the meter says of a CUDA device, with its allocator's record played by doubles."""

from __future__ import annotations

import pytest
import torch

from planner.torch_adapter.meters.library_workspaces import library_workspace_bytes
from runtime.measure import memory_meter
from runtime.measure.memory_meter import MemoryMeter

MIB = 2**20


@pytest.fixture
def record(monkeypatch):
    """An allocator with 100 MiB at its peak and 60 MiB now, of which a library has 32 MiB."""
    monkeypatch.setattr(memory_meter, "library_workspace_bytes", lambda device: 32 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 60 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 120 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 3})


def test_workspaces_of_libraries_are_left_out_of_what_tensors_hold(record):
    meter = MemoryMeter(torch.device("cuda", 0), [])
    assert (meter.peak_bytes, meter.live_bytes) == (68 * MIB, 28 * MIB)
    assert (meter.reserved_peak_bytes, meter.allocation_retries) == (120 * MIB, 3)


def test_the_cpu_has_no_allocator_of_its_own():
    meter = MemoryMeter(torch.device("cpu"), [])
    assert (meter.library_bytes, meter.reserved_peak_bytes, meter.allocation_retries) == (0, None, None)


def test_a_librarys_workspace_is_what_stays_after_a_product(monkeypatch):
    cleared, known = [], iter([512, 512 + 8 * MIB])
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(1), raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(known))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert library_workspace_bytes(torch.device("cpu")) == 8 * MIB
    assert cleared == [1]
