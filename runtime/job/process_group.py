"""Joining and leaving a job: the process groups that the launcher's environment describes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from planner.machine.identity import available_cores
from runtime.job.allocator import keep_freed_memory

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
LEAVE_SECONDS = 20.0

ALLOCATOR_SETTING = "PYTORCH_CUDA_ALLOC_CONF"
"""Environment variable that CUDA's allocator reads before its first allocation."""


class LaunchError(ValueError):
    """A job that cannot be started with the given options."""


@dataclass(slots=True)
class Membership:
    """A rank's part in a job; ``exit_code`` is that of its process if leaving the job hangs."""

    exit_code: int = 0


def rank_device(wanted: str) -> torch.device:
    """Device of this rank: ``cpu``, or ``cuda`` with the local rank's number.

    A launcher may show each rank its own device alone; then that is its number 0.

    Raises
    ------
    LaunchError
        If there is no such device for every local rank.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    seen = torch.cuda.device_count()
    if wanted == "cuda" and seen == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return torch.device("cuda", 0)
    if wanted != "cuda" or seen < local_ranks:
        raise LaunchError(
            f"device {wanted!r}: this machine has {seen} CUDA devices for {local_ranks} ranks; "
            "use --device cpu or fewer ranks per machine"
        )
    return torch.device("cuda", local_rank)


def enter(device: torch.device) -> None:
    """Make the process group that the launcher's environment describes; on CPU its ranks share the machine's cores.

    On CUDA the group is bound to the rank's device, so that NCCL connects at once and splits its communicators, and
    the allocator's segments grow in place, so that free memory is not in pieces.
    """
    if device.type == "cuda":
        os.environ.setdefault(ALLOCATOR_SETTING, "expandable_segments:True")
        torch.cuda.set_device(device)
        dist.init_process_group(backend_of(device), timeout=COLLECTIVE_TIMEOUT, device_id=device)
        return
    torch.set_num_threads(max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    keep_freed_memory()
    dist.init_process_group(backend_of(device), timeout=COLLECTIVE_TIMEOUT)


def round_as_float32() -> None:
    """Have CUDA multiply 32-bit tensors in 32 bits: TF32 rounds to 10, which a comparison with one process shows."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def backend_of(device: torch.device) -> str:
    """Backends of a job on a kind of device: CPU tensors go over gloo."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextmanager
def joined(device: torch.device) -> Iterator[Membership]:
    """Join the job of the environment (``torchrun`` or :mod:`runtime.job.launch`); leave it at the end.

    Collectives of CPU tensors go over gloo, those of CUDA tensors over NCCL. On CPU the machine's cores are
    shared among its ranks. After an error the group is left to die with the process: the other ranks may be
    waiting in a collective, and the launcher ends them.

    Raises
    ------
    LaunchError
        If no launcher set the environment.
    """
    if "RANK" not in os.environ:
        raise LaunchError("no launcher: start with `torchrun --nproc-per-node N -m runtime.rank_main PLAN`")
    enter(device)
    membership = Membership()
    yield membership
    dist.barrier()
    _leave(membership.exit_code)


def _leave(exit_code: int) -> None:
    """Destroy the groups; a process whose work is done must not hang in their destructors."""
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)
    if leaving.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def broadcast_text(text: str, source: int = 0) -> str:
    """The ``text`` of rank ``source`` on every rank."""
    encoded = text.encode()
    length = torch.tensor([len(encoded)])
    dist.broadcast(length, source)
    content = torch.zeros(int(length), dtype=torch.uint8)
    if dist.get_rank() == source and encoded:
        content = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    dist.broadcast(content, source)
    return content.numpy().tobytes().decode()


def gather_texts(text: str) -> list[str]:
    """Every rank's ``text``, in the order of the ranks, on every rank."""
    return [broadcast_text(text, source) for source in range(dist.get_world_size())]
