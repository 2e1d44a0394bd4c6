"""Wall and processor time of a solve that runs several jobs in worker processes."""

from __future__ import annotations

import threading
import time
from typing import Self

from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import SolverPool
from formulations.solvers.processes.transfer import SharedProblem
from formulations.solvers.processes.worker import Listener, WorkerOutcome
from formulations.solvers.protocol.registry import SolverSpec


class Meter(SolverPool):
    """A pool that runs jobs in the workers of another pool and sums their processor time.

    Parameters
    ----------
    pool
        Pool whose workers are used; a new one if None.
    """

    def __init__(self, pool: SolverPool | None) -> None:
        super().__init__()
        self._owned = pool is None
        self._lender = SolverPool() if pool is None else pool
        self._counting = threading.Lock()
        self._started, self._own_cpu = time.perf_counter(), time.process_time()
        self._worker_cpu = 0.0
        self.peak_rss_bytes = 0

    def run(
        self, spec: SolverSpec, problem: StrategyProblem | SharedProblem, options: SolveOptions, listener: Listener
    ) -> WorkerOutcome:
        """Run one job and count it."""
        outcome = self._lender.run(spec, problem, options, listener)
        with self._counting:
            self._worker_cpu += outcome.cpu_seconds
            self.peak_rss_bytes = max(self.peak_rss_bytes, outcome.peak_rss_bytes)
        return outcome

    def warm_soon(self, *specs: SolverSpec) -> None:
        """Start workers in the background."""
        self._lender.warm_soon(*specs)

    def close(self) -> None:
        """End the workers, unless they are another pool's."""
        if self._owned:
            self._lender.close()

    def __enter__(self) -> Self:
        return self

    @property
    def seconds(self) -> float:
        """Wall time since the meter was made."""
        return time.perf_counter() - self._started

    @property
    def cpu_seconds(self) -> float:
        """Processor time of this process since the meter was made, and of the workers' finished jobs."""
        return time.process_time() - self._own_cpu + self._worker_cpu
