"""Runs a solver in a process of its own: hard limits, crash isolation, and incumbents that survive.

HiGHS (highspy) and CP-SAT (ortools) cannot be imported into one process, and any solver may hang, crash
or eat the machine. A worker is a freshly started interpreter, not a fork and not
:mod:`multiprocessing`'s spawn, which would import the user's main script again and fail in scripts
without a ``__main__`` guard and in interactive sessions. POSIX only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import TracebackType

from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.processes.transfer import SharedProblem, share
from formulations.solvers.processes.worker_process import (
    Failed,
    Finished,
    Incumbent,
    Job,
    Message,
    Preparation,
    Ready,
    Started,
)
from formulations.solvers.processes.worker_process import read_status_bytes as _status_bytes
from formulations.solvers.protocol.exchange import Update
from formulations.solvers.protocol.registry import LIBRARIES, SolverSpec

STARTUP_SECONDS = 120.0
"""Not tunable: time after which a process that does not answer is given up."""

_COMMAND = "from formulations.solvers.processes.worker_process import main; main()"
_RETURNS_MEMORY = ("MALLOC_TRIM_THRESHOLD_", str(256 * 1024))
"""For glibc: where it is set, freed arrays go back to the system at once. Else they are kept up to a size that grows to
64 MiB, and pieces of them with every job (mallopt(3), M_TRIM_THRESHOLD)."""

_POLL_SECONDS = 0.05
"""Not tunable: how often a job is looked after."""

_OUTPUT_TAIL = 2000
"""Not tunable: characters of output that a message has."""


class WorkerStartError(RuntimeError):
    """A worker process did not come up; the message has what it printed."""


class Ending(StrEnum):
    """Why a job ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CRASHED = "crashed"
    TIME_LIMIT = "time limit"
    MEMORY_LIMIT = "memory limit"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class WorkerOutcome:
    """How a job ended; ``claim`` is None unless it finished."""

    ending: Ending
    claim: Claim | None
    message: str
    bad_input: bool
    cpu_seconds: float
    peak_rss_bytes: int


class _Usage:
    """Processor time and peak of a process since the start of a job, for jobs that cannot say so themselves."""

    def __init__(self, process_id: int) -> None:
        self.process_id = process_id
        self.peak_rss_bytes = 0
        self._before = self._total_cpu_seconds()
        self.cpu_seconds = 0.0

    def measure(self) -> None:
        self.peak_rss_bytes = max(self.peak_rss_bytes, _status_bytes(self.process_id, "VmHWM"))
        self.cpu_seconds = max(self.cpu_seconds, self._total_cpu_seconds() - self._before)

    def _total_cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.process_id}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return sum(int(fields[k]) for k in (11, 12, 13, 14)) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Listener:
    """What to call while a job runs, in the caller's thread.

    Parameters
    ----------
    on_progress, on_incumbents
        Take what the solver found.
    from_others
        Returns what other solvers found since the last call, or None.
    should_stop
        Returns whether the job has become pointless; it is then killed.
    """

    on_progress: Callable[[Progress], None] = field(default=lambda _: None)
    on_incumbents: Callable[[list[tuple[int, ...]]], None] = field(default=lambda _: None)
    from_others: Callable[[], Update | None] = field(default=lambda: None)
    should_stop: Callable[[], bool] = field(default=lambda: False)


def _search_path() -> str:
    """Where modules are looked for, as this process does it now."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def grace_seconds(time_limit: float) -> float:
    """Seconds after its time limit at which a solver that does not return is killed."""
    return 1.0 + 0.1 * time_limit


class Worker:
    """One solver process; runs one job at a time and may be reused for solvers that its library does not exclude.

    Raises
    ------
    WorkerStartError
        If the process does not answer within :data:`STARTUP_SECONDS`.
    """

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        environment = dict(os.environ)
        self._search_path = environment["PYTHONPATH"] = _search_path()
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[variable] = "1"
        environment.setdefault(*_RETURNS_MEMORY)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
            )
        except OSError as error:
            raise WorkerStartError(f"cannot start a solver process with {sys.executable}: {error}") from error
        finally:
            theirs.close()
        self.library: str | None = None
        """What was loaded here that excludes others, if anything."""
        self._await_ready()

    @property
    def alive(self) -> bool:
        """Whether the process runs and can take another job."""
        return self._process.poll() is None

    @property
    def process_id(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def suits(self, spec: SolverSpec) -> bool:
        """Whether a solver may run here beside what was loaded already; one of the user's must be found as well."""
        if not spec.is_built_in and self._search_path != _search_path():
            return False
        return self.library in (None, spec.library) or (spec.library is None and self.library in LIBRARIES.values())

    def run(
        self, spec: SolverSpec, problem: StrategyProblem | SharedProblem, options: SolveOptions, listener: Listener
    ) -> WorkerOutcome:
        """Run one job to its end or kill it; never raises for what the solver does.

        Ctrl-C kills the worker and returns :attr:`Ending.INTERRUPTED`.
        """
        used = _Usage(self.process_id)
        self.library = spec.library or self.library
        try:
            shared = share(problem) if isinstance(problem, StrategyProblem) else problem
            self._connection.send(Job(spec, shared.packed, options, listener.from_others() or Update()))
            send_handle(self._connection, shared.memory.fileno(), self.process_id)
            return self._follow(options, listener, used)
        except KeyboardInterrupt:
            return self._kill(Ending.INTERRUPTED, "interrupted", listener, used)
        except (EOFError, ConnectionError):
            return self._kill(Ending.CRASHED, "", listener, used)
        except BaseException:
            self.close()  # the listener raised; the job still runs, and its result is not needed
            raise

    def prepare(self, spec: SolverSpec) -> None:
        """Let the process load what a solver needs; whatever comes next waits for that."""
        self.library = spec.library or self.library
        with contextlib.suppress(ConnectionError):  # the next job fails with a clear message where the process is gone
            self._connection.send(Preparation(spec))

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        if self.alive:
            self._end()
        self._process.wait()
        self._output.close()

    def _end(self) -> None:
        """Kill the process and what it has started, which share its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + STARTUP_SECONDS
        try:
            while time.monotonic() < deadline and self.alive:
                if self._connection.poll(_POLL_SECONDS):
                    message = self._connection.recv()
                    if isinstance(message, Ready):
                        return
        except (EOFError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
        except BaseException:
            self.close()
            raise
        state = f"ended with exit code {self._process.poll()}" if not self.alive else "did not answer"
        printed = self._printed()
        self.close()
        raise WorkerStartError(f"the solver process {state} while starting. It printed:\n{printed or '(nothing)'}")

    def _follow(self, options: SolveOptions, listener: Listener, used: _Usage) -> WorkerOutcome:
        deadline = time.monotonic() + STARTUP_SECONDS
        while True:
            self._connection.poll(_POLL_SECONDS)
            for message in self._deliver(listener):
                if isinstance(message, Started):
                    deadline = time.monotonic() + options.time_limit + grace_seconds(options.time_limit)
                elif isinstance(message, Finished):
                    text = message.claim.message
                    return WorkerOutcome(
                        Ending.FINISHED, message.claim, text, False, message.cpu_seconds, message.peak_rss_bytes
                    )
                elif isinstance(message, Failed):
                    text = message.summary if message.bad_input else message.details
                    return WorkerOutcome(
                        Ending.FAILED, None, text, message.bad_input, message.cpu_seconds, message.peak_rss_bytes
                    )
            news = listener.from_others()
            if news is not None:
                self._connection.send(news)
            if listener.should_stop():
                return self._kill(Ending.STOPPED, "stopped", listener, used)
            used.measure()
            limit = options.memory_limit_bytes
            resident = _status_bytes(self.process_id, "VmRSS") if limit is not None else 0
            if limit is not None and resident > limit:
                text = f"killed: {resident} bytes resident, the limit is {limit}"
                return self._kill(Ending.MEMORY_LIMIT, text, listener, used)
            if time.monotonic() > deadline:
                text = f"killed: no answer {grace_seconds(options.time_limit):.1f} s after the time limit"
                return self._kill(Ending.TIME_LIMIT, text, listener, used)

    def _deliver(self, listener: Listener) -> list[Message]:
        """Read everything that has arrived; call the listener; return the messages about the job itself."""
        others: list[Message] = []
        incumbents: list[tuple[int, ...]] = []
        try:
            while self._connection.poll(0):
                message = self._connection.recv()
                if isinstance(message, Incumbent):
                    incumbents.append(message.choices)
                elif isinstance(message, Progress):
                    listener.on_progress(message)
                else:
                    others.append(message)
        finally:
            if incumbents:
                listener.on_incumbents(incumbents)
        return others

    def _kill(self, ending: Ending, text: str, listener: Listener, used: _Usage) -> WorkerOutcome:
        used.measure()
        if ending is Ending.CRASHED:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
            text = f"crashed with exit code {self._process.poll()}: {self._printed() or '(it printed nothing)'}"
        if self.alive:
            self._end()
            self._process.wait()
        with contextlib.suppress(EOFError, ConnectionError):
            self._deliver(listener)
        self.close()
        return WorkerOutcome(ending, None, text, False, used.cpu_seconds, used.peak_rss_bytes)

    def _printed(self) -> str:
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - _OUTPUT_TAIL))
        return self._output.read().decode(errors="replace").strip()


class SolverPool:
    """Keeps workers warm between solves: a warm solve costs milliseconds, a fresh process half a second.

    Workers are kept apart by the libraries that they have loaded, because those exclude each other; solvers that load
    none run beside any. Safe to use from several threads; close it, or use it in a ``with`` block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._warmed: dict[str, Worker] = {}
        """Workers that a solver will have first, by its name."""
        self._starting: list[threading.Thread] = []

    def run(
        self, spec: SolverSpec, problem: StrategyProblem | SharedProblem, options: SolveOptions, listener: Listener
    ) -> WorkerOutcome:
        """Run one job on an idle worker, or on a new one."""
        worker = self._take(spec)
        if worker is None:
            self._await_starting()
            worker = self._take(spec)
        if worker is None or not worker.alive:
            worker = Worker()
        outcome = worker.run(spec, problem, options, listener)
        if worker.alive:
            with self._lock:
                self._idle.append(worker)
        return outcome

    def warm_soon(self, *specs: SolverSpec) -> None:
        """Start a worker for each solver that no idle one suits, and prepare it, beside what the caller does.

        A run waits for them.
        """
        for spec in specs:
            thread = threading.Thread(target=self._warm, args=(spec,), daemon=True)
            with self._lock:
                thread.start()
                self._starting.append(thread)

    def _warm(self, spec: SolverSpec) -> None:
        """Start a worker; a failure is raised when the worker is needed."""
        with self._lock:
            if spec.name in self._warmed or any(worker.suits(spec) for worker in self._idle):
                return
        with contextlib.suppress(WorkerStartError):
            worker = Worker()
            worker.prepare(spec)
            with self._lock:
                if self._warmed.setdefault(spec.name, worker) is not worker:
                    self._idle.append(worker)

    def _await_starting(self) -> None:
        """Wait for the workers that are being started."""
        with self._lock:
            starting = list(self._starting)
        for thread in starting:
            thread.join()
        with self._lock:  # only now: after an interrupt above, close() still waits for them
            self._starting = [thread for thread in self._starting if thread not in starting]

    def _take(self, spec: SolverSpec) -> Worker | None:
        """Take the worker that was started for a solver, or an idle one that suits it: best of its own library.

        Where there is none, one that was started for another solver will do.
        """
        with self._lock:
            warmed = self._warmed.pop(spec.name, None)
            if warmed is not None:
                return warmed
            suitable = [worker for worker in self._idle if worker.suits(spec)]
            found = next((each for each in suitable if each.library == spec.library), next(iter(suitable), None))
            if found is not None:
                self._idle.remove(found)
                return found
            other = next((name for name, worker in self._warmed.items() if worker.suits(spec)), None)
            return None if other is None else self._warmed.pop(other)

    def close(self) -> None:
        """End all idle workers."""
        self._await_starting()
        with self._lock:
            workers = [*self._idle, *self._warmed.values()]
            self._idle.clear()
            self._warmed.clear()
        for worker in workers:
            worker.close()

    def __enter__(self) -> SolverPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
