"""What was alive on a rank where memory ran out, beside what the plan said: a file, and a note on the error."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from planner.common.units import format_bytes
from runtime.measure.local_shards import local_tensor
from runtime.measure.memory_meter import resident_set_peak_bytes

_ON_CPU = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")
_MOST_ROWS = 60


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A tensor, or all of a purpose: bytes as the plan has them at that moment, and as they were found."""

    name: str
    purpose: str
    planned: int
    found: int


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is one of torch's allocators, or Python's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _ON_CPU)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of some tensors, each counted once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def seen_tensors(device: torch.device) -> list[Tensor]:
    """Plain tensors on a device that Python knows of; those that only autograd holds are not among them."""
    kinds = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    found = [entry for entry in gc.get_objects() if type(entry) in kinds]
    return [entry for entry in found if entry.device.type == device.type]


def note_memory(
    error: BaseException, where: str, planned: int, found: int, rows: Sequence[MemoryRow], device: torch.device
) -> None:
    """Write a file of what was alive, and name it in a note on the error.

    Parameters
    ----------
    error
        Of an allocator.
    where
        What ran.
    planned, found
        Bytes of tensors on this rank's device at that moment.
    rows
        What they are made of.
    device
        Of this rank.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    totals = f"{format_bytes(found)} of tensors alive, the plan said {format_bytes(planned)}"
    lines = [f"rank {rank} ran out of memory in {where}: {totals}", f"{type(error).__name__}: {error}", ""]
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        lines.append(
            f"allocated {torch.cuda.memory_allocated(device)}, reserved {torch.cuda.memory_reserved(device)}, "
            f"free {free} of {whole} bytes of {device}"
        )
    lines += [f"largest resident set of the process: {resident_set_peak_bytes()} bytes", ""]
    lines.append(f"{'planned bytes':>16} {'found bytes':>16}  purpose, tensor")
    ordered = sorted(rows, key=lambda row: -max(row.planned, row.found))
    lines += [f"{row.planned:>16} {row.found:>16}  {row.purpose}, {row.name}" for row in ordered[:_MOST_ROWS]]
    if rest := ordered[_MOST_ROWS:]:
        planned_rest, found_rest = sum(row.planned for row in rest), sum(row.found for row in rest)
        lines.append(f"{planned_rest:>16} {found_rest:>16}  {len(rest)} more")
    try:
        descriptor, path = tempfile.mkstemp(f"-rank-{rank}.txt", "meshwright-out-of-memory-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except OSError as failure:
        path = f"nothing, {failure}"
    error.add_note(f"out of memory in {where}: {totals}; what was alive is in {path}")


def note_rank_memory(
    error: BaseException,
    where: str,
    resident: Sequence[Tensor],
    gradients: Sequence[Tensor],
    planned: tuple[int, int, int],
    device: torch.device,
) -> None:
    """The same where only purposes are known.

    Parameters
    ----------
    error, where, device
        As in :func:`note_memory`.
    resident, gradients
        Tensors that live between steps, and those of this step's gradients.
    planned
        Bytes at the plan's peak of what lives between steps, of gradients, and of all else.
    """
    states = storage_bytes(map(local_tensor, resident))
    sums = storage_bytes(map(local_tensor, gradients))
    found = storage_bytes(seen_tensors(device))
    if device.type == "cuda":
        found = torch.cuda.memory_allocated(device)
    rows = [
        MemoryRow("parameters, buffers, optimizer", "states", planned[0], states),
        MemoryRow("of this step", "gradients", planned[1], sums),
        MemoryRow("activations, workspace, what the engine gathers", "rest", planned[2], found - states - sums),
    ]
    note_memory(error, where, sum(planned), found, rows, device)
