"""The process group of a training process: the launcher's, the user's, or one of this process alone."""

from __future__ import annotations

import atexit
import os
import sys
import time

import torch
import torch.distributed as dist

from runtime.job import watchdog
from runtime.job.process_group import COLLECTIVE_TIMEOUT, LaunchError, backend_of, enter, rank_device, use_device
from runtime.library.errors import LoadError

_SETTLED_SECONDS = 0.2
"""Time for threads of gloo to drop their last collective."""


def chosen_device(device: torch.device | str | None) -> torch.device:
    """The device asked for; if None, this rank's CUDA device where there is one for every rank, and the CPU elsewhere.

    Raises
    ------
    LoadError
        It is no device of this machine.
    """
    if device is None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks else "cpu"
    try:
        found = torch.device(device)
        if found.type == "cuda" and found.index is None:
            found = rank_device("cuda") if "LOCAL_RANK" in os.environ else torch.device("cuda", 0)
    except (RuntimeError, LaunchError) as error:
        raise LoadError(f"device {str(device)!r}: {error}") from error
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not torch.cuda.is_available()):
        raise LoadError(f"device {str(device)!r} is not there: use cpu or cuda")
    return found


def join(device: torch.device) -> None:
    """Join the launcher's job, or make a group of one process; a group that exists already is used.

    Raises
    ------
    LoadError
        The existing group cannot send tensors of the CPU, which plans and checkpoints need.
    """
    if device.type == "cuda":
        use_device(device)
    if dist.is_initialized():
        if "gloo" not in str(dist.get_backend_config()):
            raise LoadError(
                f"the process group has backend {dist.get_backend_config()}, none for the CPU: initialise it with "
                "'cpu:gloo,cuda:nccl'"
            )
        if "RANK" in os.environ:
            watchdog.watch()
        return
    if "RANK" in os.environ:
        enter(device)
        watchdog.watch()
        atexit.register(_leave)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it from a binary module
        dist.init_process_group(backend_of(device), store=alone, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)


def _leave() -> None:
    """Destroy the groups before the interpreter ends, and let their threads drop what they still hold.

    A thread of gloo that drops the last reference to a Python object while the interpreter ends aborts the process.
    After an uncaught error the groups die with the process: others may be waiting in a collective.
    """
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        watchdog.leave()
        dist.destroy_process_group()
        time.sleep(_SETTLED_SECONDS)
