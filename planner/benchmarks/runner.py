"""Runs solvers on a suite, one row after another, and keeps every row that was finished."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from formulations.instances.random_families import family_problem
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.problem.time_limit import noticing_interrupts
from formulations.solvers.processes.worker import SolverPool
from formulations.solvers.processes.worker_process import read_status_bytes
from formulations.solvers.protocol.registry import SOLVERS, find_solver
from formulations.solvers.running.ledger import SolverContradiction
from formulations.solvers.running.run import SolverInputError, solve
from planner.benchmarks.results import BenchResult
from planner.benchmarks.rows import BenchRow, Moment
from planner.benchmarks.suites import BenchInstance, Suite

_REHEARSAL_SECONDS = 10.0


class BenchError(ValueError):
    """Invalid options of a benchmark; the message names the option, its value and the remedy."""


class Observer:
    """Callbacks of a running benchmark, in the caller's thread; they do nothing unless overridden."""

    def begins(self, instance: str, solver: str) -> None:
        """Take the instance and the solver that begins on it; for a file that is being read, ``reading``."""

    def progress(self, progress: Progress) -> None:
        """Take an improvement of the running solve."""

    def row(self, row: BenchRow) -> None:
        """Take a finished row, which is in the file already."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    problem: StrategyProblem | None
    seconds: float
    cpu_seconds: float


def bench(
    suite: Suite,
    solvers: Sequence[str] | None = None,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    best_known: Mapping[str, int] | None = None,
    json_path: str | Path | None = None,
    observer: Observer | None = None,
) -> BenchResult:
    """Run every solver on every instance of a suite.

    Ctrl-C ends the benchmark and returns the finished rows, then the interrupted one. A solver that refuses an
    instance, crashes or hangs gets a row with that message.

    Parameters
    ----------
    suite
        From :func:`random_suite`, :func:`contest_suite`, or of your own.
    solvers
        Names for :func:`formulations.solvers.protocol.registry.find_solver`. Solvers that are not built in first
        solve a problem of six nodes; all of them do where the suite needs warm processes. The suite's own if None.
    time_limit
        Seconds for one instance and solver, as :attr:`BenchRow.seconds` counts them; the instance's or the
        suite's own if None.
    seed
        Seed of the solvers.
    best_known
        Instance -> best known objective, to be printed beside ours. May name instances that are not here.
    json_path
        Where the rows are written, atomically, after each one.
    observer
        Callbacks for progress and rows.

    Returns
    -------
    BenchResult
        The rows, in order of instances and solvers.

    Raises
    ------
    BenchError
        The limit is not positive, no solver is named, one is named twice, or ``best_known`` fits nothing here.
    UnknownSolverError, SolverInputError
        A solver does not exist, or refuses the small problem.
    ProblemError, OSError
        An instance is malformed, or the rows cannot be written; earlier rows are in the file.
    """
    solvers = suite.solvers if solvers is None else solvers
    _validate(suite, solvers, suite.time_limit if time_limit is None else time_limit, best_known)
    run = SuiteRun(suite, time_limit, seed, best_known or {}, json_path, observer or Observer())
    interrupted = False
    with ExitStack() as stack:
        noticed = stack.enter_context(noticing_interrupts())
        try:
            pool = None if suite.as_one_command else stack.enter_context(SolverPool())
            run.rehearse(solvers, pool)
            _raise_if(noticed)
            for instance in suite.instances:
                loaded = run.load(instance)
                others = [] if instance.load is None else [*instance.references, *solvers]
                for solver in dict.fromkeys([*instance.own_solvers, *others]):
                    run.add_row(instance, loaded, solver, pool)
                    _raise_if(noticed)
        except KeyboardInterrupt:
            interrupted = True
    return BenchResult(tuple(run.rows), interrupted)


def _validate(suite: Suite, solvers: Sequence[str], limit: float, best_known: Mapping[str, int] | None) -> None:
    if not (math.isfinite(limit) and limit > 0):
        raise BenchError(f"time limit is {limit}; give a positive number of seconds")
    if not solvers:
        raise BenchError("no solver is named; give at least one, such as portfolio")
    for solver in solvers:
        find_solver(solver)
        if solvers.count(solver) > 1:
            raise BenchError(f"solver {solver} is named twice; name each once")
    names = [instance.name for instance in suite.instances]
    if best_known and not best_known.keys() & set(names):
        raise BenchError(
            f"none of the best known objectives ({', '.join(best_known)}) is of an instance here ({', '.join(names)}); "
            "use the instances' names"
        )


class SuiteRun:
    """The rows of one benchmark as they come."""

    def __init__(
        self,
        suite: Suite,
        time_limit: float | None,
        seed: int,
        best_known: Mapping[str, int],
        json_path: str | Path | None,
        observer: Observer,
    ) -> None:
        self.suite, self.time_limit, self.seed = suite, time_limit, seed
        self.best_known, self.json_path, self.observer = best_known, json_path, observer
        self.rows: list[BenchRow] = []

    def rehearse(self, solvers: Sequence[str], pool: SolverPool | None) -> None:
        """Let solvers solve a small problem: a name that is no solver fails at once, and processes are warm."""
        problem = family_problem("cliques", "small")
        limit = self.suite.time_limit if self.time_limit is None else self.time_limit
        options = SolveOptions(time_limit=min(limit, _REHEARSAL_SECONDS), seed=self.seed)
        references = [solver for instance in self.suite.instances for solver in instance.references]
        for solver in dict.fromkeys([*references, *solvers]):
            if pool is not None or solver not in SOLVERS:
                self.observer.begins("rehearsal", solver)
                solve(problem, solver, options, pool=pool)

    def load(self, instance: BenchInstance) -> _Loaded:
        """Make or read the problem and take the time."""
        self.observer.begins(instance.name, "reading")
        started, cpu_started = time.perf_counter(), time.process_time()
        problem = None if instance.load is None else instance.load()
        if not self.suite.as_one_command:
            return _Loaded(problem, 0.0, 0.0)
        return _Loaded(problem, time.perf_counter() - started, time.process_time() - cpu_started)

    def _limit(self, instance: BenchInstance) -> float:
        if self.time_limit is not None:
            return self.time_limit
        return self.suite.time_limit if instance.time_limit is None else instance.time_limit

    def add_row(self, instance: BenchInstance, loaded: _Loaded, solver: str, pool: SolverPool | None) -> None:
        """Solve, and keep the row."""
        self.observer.begins(instance.name, solver)
        started = time.perf_counter()
        contradiction = ""
        try:
            result = self._solve(instance, loaded, solver, pool)
        except SolverInputError as error:
            result = _without_result(solver, time.perf_counter() - started, str(error))
        except SolverContradiction as error:
            contradiction = str(error)
            result = _without_result(solver, time.perf_counter() - started, "")
        row = BenchRow(
            instance=instance.name,
            formulation=instance.formulation,
            solver=solver,
            status=result.status,
            objective=result.objective,
            bound=result.bound,
            gap=result.gap,
            seconds=loaded.seconds + result.seconds,
            cpu_seconds=loaded.cpu_seconds + result.cpu_seconds,
            peak_rss_bytes=result.peak_rss_bytes,
            parse_seconds=loaded.seconds,
            parent_peak_rss_bytes=read_status_bytes("self", "VmHWM"),
            time_limit=self._limit(instance),
            seed=self.seed,
            best_known=self.best_known.get(instance.name),
            message=result.message,
            contradiction=contradiction,
            history=tuple(
                Moment(loaded.seconds + entry.seconds, entry.incumbent, entry.bound, entry.source)
                for entry in result.history
            ),
            proof=result.proof,
            claimed=result.claimed,
            nodes=None if loaded.problem is None else len(loaded.problem.nodes),
        )
        self.rows.append(row)
        if self.json_path is not None:
            BenchResult(tuple(self.rows)).save(self.json_path)
        self.observer.row(row)

    def _solve(self, instance: BenchInstance, loaded: _Loaded, solver: str, pool: SolverPool | None) -> SolveResult:
        remaining = self._limit(instance) - loaded.seconds
        if remaining <= 0:
            return _without_result(solver, 0.0, "reading took the whole time limit")
        options = SolveOptions(time_limit=remaining, seed=self.seed)
        if solver in instance.own_solvers:
            return instance.own_solvers[solver](options, self.observer.progress, pool)
        assert loaded.problem is not None, "other solvers run only on instances that are canonical problems"
        return solve(loaded.problem, solver, options, self.observer.progress, pool)


def _without_result(solver: str, seconds: float, message: str) -> SolveResult:
    return SolveResult(Status.NO_SOLUTION, None, None, None, None, solver, seconds, 0.0, 0, (), (), message)


def _raise_if(noticed: threading.Event) -> None:
    if noticed.is_set():
        raise KeyboardInterrupt
