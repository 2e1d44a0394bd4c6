"""A pool of gloo ranks that stays alive between tests.

Running a test function on ranks costs milliseconds, importing torch and transformers into each of them seconds: so
ranks are forks of one server that has imported them. A function is named by its file and name, so it can stand beside
the test that uses it; it is called as ``function(*args)`` on every rank, where ``torch.distributed`` is initialised,
and must be at the top level of its file.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

IMPORTED = (
    "runtime.layer_training",
    "runtime.operator_executor",
    "planner.capture",
    "torch._dynamo",
    "torch.testing",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bert", "t5", "vit")),
)
"""What the server imports: modules alone, which start no thread."""

GRACE_SECONDS = 3.0
START_SECONDS = 120.0


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class RankPool:
    """``size`` processes in one gloo group; restarted by the next call after an error or a hang."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``function(*args)`` on all ranks and return their results.

        Raises
        ------
        RankError
            If a rank raises; names the rank and holds its traceback.
        TimeoutError
            If the ranks do not answer within ``timeout`` seconds; they are ended.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((inspect.getfile(function), function.__qualname__, args))
        return self._collect(timeout, f"{function.__qualname__}{args}")

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*IMPORTED])
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._folder = tempfile.TemporaryDirectory(prefix="rank_pool_")
        store = Path(self._folder.name) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, str(store)), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(START_SECONDS, "start")

    def _collect(self, timeout: float, what: str) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    succeeded, value = False, f"the process of rank {rank} died"
                if succeeded:
                    results[rank] = value
                else:
                    errors[rank] = value
                    # The others may wait for this rank for ever in a collective.
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if errors:
            self.close()
            raise RankError("\n".join(f"rank {rank} of {self.size}: {text}" for rank, text in sorted(errors.items())))
        if waiting:
            ranks = sorted(waiting.values())
            self.close()
            raise TimeoutError(f"{what}: ranks {ranks} of {self.size} did not answer within {timeout:.0f} s")
        return [results[rank] for rank in range(self.size)]


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    pipe.send((True, None))
    modules: dict[str, ModuleType] = {}
    # The pool closes its end of the pipe when it ends.
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            path, name, args = pipe.recv()
            try:
                if path not in modules:
                    modules[path] = _load(path, len(modules))
                pipe.send((True, getattr(modules[path], name)(*args)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
    os._exit(0)


def _load(path: str, number: int) -> ModuleType:
    name = f"rank_functions_{number}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module
