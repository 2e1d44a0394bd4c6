"""Solver processes that outlive the pool that started them: the next pool begins with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from formulations.solvers.processes.worker import SolverPool, Worker
from formulations.solvers.protocol.registry import SolverSpec

MOST = 6
"""Processes that are kept; each holds up to 300 MB."""
PACKAGE = "formulations."
"""Solvers of other packages may change what a process has loaded; such a process is not kept."""


class WarmWorkers:
    """Processes of closed pools."""

    def __init__(self) -> None:
        self._kept: list[Worker] = []
        self._lock = threading.Lock()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let new pools begin with what is kept, and closed ones leave what they have."""
        make, close, run = SolverPool.__init__, SolverPool.close, Worker.run
        foreign: set[Worker] = set()

        def made(pool: SolverPool) -> None:
            make(pool)
            with self._lock:
                pool._idle, self._kept = self._kept, []

        def closed(pool: SolverPool) -> None:
            pool._await_starting()
            idle = [*pool._idle, *pool._warmed.values()]
            pool._warmed.clear()
            with self._lock:
                fit = [worker for worker in idle if worker.alive and worker not in foreign][: MOST - len(self._kept)]
                self._kept += fit
            pool._idle = [worker for worker in idle if worker not in fit]
            close(pool)

        def ran(worker: Worker, spec: SolverSpec, *arguments: Any) -> Any:
            if not spec.target.startswith(PACKAGE):
                foreign.add(worker)
            return run(worker, spec, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SolverPool, "__init__", made)
            patch.setattr(SolverPool, "close", closed)
            patch.setattr(Worker, "run", ran)
            yield

    def close(self) -> None:
        """End all that are kept."""
        while self._kept:
            self._kept.pop().close()
