"""Joining and leaving a job, in the main programs of ranks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime.job import watchdog
from runtime.job.process_group import LaunchError, enter

LEAVE_SECONDS = 20.0


@dataclass(slots=True)
class Membership:
    """A rank's part in a job; ``exit_code`` is that of its process if leaving the job hangs."""

    exit_code: int = 0


@contextmanager
def joined(device: torch.device) -> Iterator[Membership]:
    """Join the job of the environment (``torchrun`` or :mod:`runtime.job.launch`); leave it at the end.

    Collectives of CPU tensors go over gloo, those of CUDA tensors over NCCL. On CPU the machine's cores are
    shared among its ranks. After an error the group is left to die with the process: the other ranks may be
    waiting in a collective, and the launcher or their watchdog ends them.

    Raises
    ------
    LaunchError
        If no launcher set the environment.
    RankFault
        If a rank of the job fails, on this rank or another.
    """
    if "RANK" not in os.environ:
        raise LaunchError("no launcher: start with `torchrun --nproc-per-node N -m runtime.rank_main PLAN`")
    enter(device)
    watchdog.watch()
    membership = Membership()
    with watchdog.faults_named():
        yield membership
        dist.barrier()
    _leave(membership.exit_code)


def _leave(exit_code: int) -> None:
    """Destroy the groups; a process whose work is done must not hang in their destructors."""
    watchdog.leave()
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)
    if leaving.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
