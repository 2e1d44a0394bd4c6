"""Measured peak memory of a rank: torch's own allocation record, and the resident set beside it.

On CUDA the caching allocator keeps the record of the device; on CPU, and for host memory that offloaded tensors
take, :class:`StorageMeter` does, which slows a step down: meter some steps, time others.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from planner.torch_adapter.meters.library_workspaces import library_workspace_bytes
from planner.torch_adapter.meters.storage_meter import StorageMeter


class MemoryMeter:
    """Peak bytes of tensors on one device, over everything that runs inside :meth:`metering`.

    Parameters
    ----------
    device
        Device of the rank.
    resident
        Tensors that exist already: parameters, module buffers, optimizer state. On CUDA they are in the record of
        the allocator, from process start on.
    storages
        The meter where there is no such record; None: a plain :class:`StorageMeter`.

    Attributes
    ----------
    library_bytes
        On CUDA, bytes of the allocator that libraries keep for themselves. They are part of the reserve of a plan, so
        the other figures leave them out; 0 elsewhere.
    """

    def __init__(self, device: torch.device, resident: Iterable[Tensor], storages: StorageMeter | None = None) -> None:
        self._device = device
        self._has_allocator_record = device.type == "cuda"
        self.library_bytes = library_workspace_bytes(device) if self._has_allocator_record else 0
        self._storages = storages or StorageMeter()
        self._storages.track(*resident)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once so far."""
        if self._has_allocator_record:
            return torch.cuda.max_memory_allocated(self._device) - self.library_bytes
        return self._storages.peak_bytes

    @property
    def host_peak_bytes(self) -> int:
        """Most bytes of offloaded tensors in host memory at once so far."""
        return self._storages.host_peak_bytes

    @property
    def reserved_peak_bytes(self) -> int | None:
        """Most bytes that CUDA's allocator held at once, tensors and the free memory between them; None elsewhere."""
        return torch.cuda.max_memory_reserved(self._device) if self._has_allocator_record else None

    @property
    def allocation_retries(self) -> int | None:
        """How often CUDA's allocator gave its free memory back and asked again; None elsewhere.

        Any such retry makes a step slower, and says that free memory was in pieces.
        """
        if not self._has_allocator_record:
            return None
        record = torch.cuda.memory_stats(self._device)
        return int(record.get("num_alloc_retries", 0))

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        if self._has_allocator_record:
            return torch.cuda.memory_allocated(self._device) - self.library_bytes
        return self._storages.live_bytes

    @contextmanager
    def metering(self, *inputs: Tensor) -> Iterator[None]:
        """Meter the block; ``inputs`` are tensors that were made for it just before."""
        self._storages.track(*inputs)
        with self._storages:
            yield


def resident_set_peak_bytes() -> int:
    """Largest resident set of this process so far, in bytes: Python, torch and libraries included.

    Linux keeps it per process image; ``getrusage``, used elsewhere, may count the parent's from before.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
