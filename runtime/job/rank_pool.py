"""Local processes in one gloo group that stay alive from run to run.

A launch of :mod:`runtime.job.launch` imports torch and transformers into every rank, which takes seconds; a pool keeps
the ranks for hundreds of small plans. They are forks of one server that has imported both.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runtime.job.process_group import COLLECTIVE_TIMEOUT, LaunchError

__all__ = ["RankPool"]

IMPORTED = ("runtime.layers.training", "planner.strategies.traced_step")
"""Modules that the server imports; importing them starts no thread."""

START_SECONDS = 120.0
GRACE_SECONDS = 3.0
"""Time for the other ranks to end after an error: they may wait for ever in a collective."""


class RankPool:
    """Processes of one thread each that run a function together; a context.

    Parameters
    ----------
    size
        Number of ranks.
    imported
        Names of modules that all ranks of this process have imported; those of the first pool count.

    Raises
    ------
    LaunchError
        They cannot be started.
    """

    def __init__(self, size: int, imported: Sequence[str] = IMPORTED) -> None:
        self.size = size
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*imported])
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(size):
            ours, theirs = context.Pipe()
            store = Path(self._folder.name) / "store"
            process = context.Process(target=_serve, args=(theirs, rank, size, store), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(START_SECONDS, "start")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = COLLECTIVE_TIMEOUT.total_seconds()
    ) -> list[Any]:
        """Call a function of a module on all ranks and return their results.

        Parameters
        ----------
        function, arguments
            As :mod:`pickle` takes them; ``torch.distributed`` is initialised where it is called.
        timeout
            Seconds.

        Raises
        ------
        LaunchError
            A rank raises or dies, or they do not answer in time; all are ended then.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return self._collect(timeout, "answer")

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []
        self._folder.cleanup()

    def _collect(self, timeout: float, expected: str) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    succeeded, value = False, self._end_of(rank)
                if succeeded:
                    results[rank] = value
                    continue
                failures.append(f"rank {rank} of {self.size} failed: {value}")
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures or waiting:
            silent = sorted(waiting.values())
            self.close()
            late = f"ranks {silent} of {self.size} did not {expected} within {timeout:g} s"
            raise LaunchError("\n".join(failures) or late)
        return [results[rank] for rank in range(self.size)]

    def _end_of(self, rank: int) -> str:
        """Say how the process of a rank ended that closed its pipe."""
        process = self._processes[rank]
        process.join(GRACE_SECONDS)
        code = process.exitcode
        if code is None:
            return "its process closed the pipe"
        if code >= 0:
            return f"its process died with exit code {code}"
        return f"its process died by {signal.Signals(-code).name}"


def _serve(pipe: Connection, rank: int, size: int, store: Path) -> None:
    """Loop of a rank until its pool closes the pipe."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
    pipe.send((True, None))
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = True, function(*arguments)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send(answer)
    os._exit(0)  # destructors of process groups may hang
