"""The child's side of a solver worker; :mod:`formulations.solvers.processes.worker` starts it with :func:`main`.

Reads jobs from the inherited connection, runs them one after another and streams what they find.
The process ends when the connection closes or when its parent is gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.solvers.processes.preparation import prepare
from formulations.solvers.processes.transfer import PackedProblem, unpack
from formulations.solvers.protocol.exchange import EXCHANGE, Update
from formulations.solvers.protocol.registry import SolverSpec

_PARENT_CHECK_SECONDS = 1.0
"""Not tunable: how often a process looks for its parent."""
_LONG_JOB_SECONDS = 1.0
"""Not tunable: after a job of more processor time than this, cycles are looked for in all that the process has loaded,
which takes up to 0.1 s; after a shorter one only in what it made, so that a worker is free for the next one at once."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a worker, with what other solvers found before it begins.

    The descriptor of the file with the problem's arrays follows it, and each later :class:`Update`.
    """

    spec: SolverSpec
    problem: PackedProblem
    options: SolveOptions
    news: Update


@dataclass(frozen=True, slots=True)
class Preparation:
    """A solver that the next job will probably ask for."""

    spec: SolverSpec


@dataclass(frozen=True, slots=True)
class _Received:
    """A job, and the descriptor of the file with its problem's arrays."""

    job: Job
    memory: int


Task = _Received | Preparation


@dataclass(frozen=True, slots=True)
class Ready:
    """The interpreter is up and waits for a job."""


@dataclass(frozen=True, slots=True)
class Started:
    """The job has arrived and its solver is imported; the clock runs from here."""


@dataclass(frozen=True, slots=True)
class Incumbent:
    """A better assignment, not yet checked."""

    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The solver returned."""

    claim: Claim
    cpu_seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The solver raised; ``bad_input`` for a ValueError, whose message is meant for the user."""

    bad_input: bool
    summary: str
    details: str
    cpu_seconds: float
    peak_rss_bytes: int


Message = Ready | Started | Progress | Incumbent | Finished | Failed


def read_status_bytes(process: int | str, field: str) -> int:
    """Read a size such as ``VmRSS`` or ``VmHWM`` of a process in bytes; 0 where it cannot be read."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def serve(connection: Connection) -> None:
    """Run jobs, and prepare for them, until the connection closes."""
    tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    connection.send(Ready())
    while (task := tasks.get()) is not None:
        if isinstance(task, Preparation):
            with contextlib.suppress(Exception):  # a failure is reported when the solver is needed
                prepare(task.spec)
        else:
            ended = _run(task, connection)
            connection.send(ended)
            if ended.cpu_seconds > _LONG_JOB_SECONDS:
                gc.unfreeze()
        del task
        gc.collect()  # what a job leaves in cycles may be large, and the next one long in coming


def _receive(connection: Connection, tasks: queue.SimpleQueue[Task | None]) -> None:
    """Read what the parent sends, also while a job runs; None ends the tasks."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            message: Job | Preparation | Update = connection.recv()
            if isinstance(message, Update):
                EXCHANGE.publish(message)
            elif isinstance(message, Job):  # what was found for the job before is not of its problem
                EXCHANGE.empty()
                EXCHANGE.publish(message.news)
                tasks.put(_Received(message, recv_handle(connection)))
            else:
                tasks.put(message)
    tasks.put(None)


def _run(received: _Received, connection: Connection) -> Finished | Failed:
    _reset_peak()
    before = _cpu_seconds()
    job = received.job
    try:
        try:
            problem = unpack(job.problem, received.memory)
        finally:
            os.close(received.memory)
        function = job.spec.load()
        gc.freeze()  # all that is sent stays until the end: looking through it again and again would take long
        connection.send(Started())
        with EXCHANGE.subscribed_to(problem):
            claim = function(problem, job.options, connection.send, lambda c: connection.send(Incumbent(tuple(c))))
    except Exception as error:
        return Failed(
            isinstance(error, ValueError),
            f"{type(error).__name__}: {error}",
            traceback.format_exc(),
            _cpu_seconds() - before,
            read_status_bytes("self", "VmHWM"),
        )
    return Finished(claim, _cpu_seconds() - before, read_status_bytes("self", "VmHWM"))


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _reset_peak() -> None:
    """Start a new resident-set peak, so that a reused worker does not report an earlier job's."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)  # what the solver has started ends as well


def main() -> None:
    """Entry point; the only argument is the file descriptor of the connection."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with Connection(int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except BrokenPipeError:
            return
