"""Process groups of a job: those that the launcher's environment describes, and texts that all ranks share."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from planner.machine.identity import available_cores
from runtime.job.allocator import keep_freed_memory

COLLECTIVE_TIMEOUT = timedelta(minutes=30)

ALLOCATOR_SETTING = "PYTORCH_CUDA_ALLOC_CONF"
"""Environment variable that CUDA's allocator reads before its first allocation."""


class LaunchError(ValueError):
    """A job that cannot be started with the given options."""


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


def use_device(device: torch.device) -> None:
    """Make a CUDA device the current one; its allocator's segments grow in place, so that free memory is whole."""
    os.environ.setdefault(ALLOCATOR_SETTING, "expandable_segments:True")
    torch.cuda.set_device(device)


def enter(device: torch.device) -> None:
    """Make the process group that the launcher's environment describes; on CPU its ranks share the machine's cores.

    On CUDA the group is bound to the rank's device, so that NCCL connects at once and splits its communicators.
    """
    if device.type == "cuda":
        use_device(device)
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
