"""Several solvers at work on one problem at a time, each in its own process: what they find, and how they end.

Threads wait for the processes; everything that is found arrives in one queue, so that one thread alone decides.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from formulations.problem.solution import Progress, SolveOptions
from formulations.solvers.processes.transfer import SharedProblem
from formulations.solvers.processes.worker import Listener, SolverPool, WorkerOutcome, WorkerStartError
from formulations.solvers.protocol.exchange import Update
from formulations.solvers.protocol.registry import find_solver

Choices = tuple[int, ...]

_EXCHANGE = True
"""Technique: members that run learn better assignments and bounds of the others."""


@dataclass(frozen=True, slots=True)
class Event:
    """A message of a member; exactly one field beside ``source`` is set.

    ``ended`` is its outcome, or the reason for which it could not even start.
    """

    source: str
    progress: Progress | None = None
    incumbents: tuple[Choices, ...] = ()
    ended: WorkerOutcome | str | None = None


class Members:
    """Members that run side by side; use it in a ``with`` block, which stops them all at its end.

    Parameters
    ----------
    workers
        Where their processes come from.
    """

    def __init__(self, workers: SolverPool) -> None:
        self._workers = workers
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._updates: dict[str, queue.SimpleQueue[Update]] = {}

    def start(self, solver: str, problem: SharedProblem, options: SolveOptions, known: Update) -> None:
        """Start a solver from what is ``known``; its name must not be running yet."""
        self._updates[solver] = queue.SimpleQueue()
        self._updates[solver].put(known)
        thread = threading.Thread(target=self._work, args=(solver, problem, options), daemon=True)
        self._threads[solver] = thread
        thread.start()

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the members whose end has not been read from :meth:`events`."""
        return tuple(self._threads)

    def publish(self, update: Update, source: str) -> None:
        """Publish a better assignment or bound to all members but its source."""
        for solver, updates in self._updates.items():
            if _EXCHANGE and solver != source:
                updates.put(update)

    def events(self, timeout: float) -> Iterator[Event]:
        """Yield what has arrived; waits up to ``timeout`` seconds for the first event."""
        try:
            event = self._events.get(timeout=max(0.0, timeout))
            while True:
                if event.ended is not None:
                    self._threads.pop(event.source).join()
                    del self._updates[event.source]
                yield event
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def stop(self) -> None:
        """Kill all members; what they have sent remains to be read from :meth:`events`."""
        self._stop.set()
        for thread in self._threads.values():
            thread.join()

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _work(self, solver: str, problem: SharedProblem, options: SolveOptions) -> None:
        listener = Listener(
            lambda progress: self._events.put(Event(solver, progress=progress)),
            lambda found: self._events.put(Event(solver, incumbents=tuple(found))),
            lambda: _newest(self._updates[solver]),
            self._stop.is_set,
        )
        try:
            outcome: WorkerOutcome | str = self._workers.run(find_solver(solver), problem, options, listener)
        except WorkerStartError as error:
            outcome = str(error)
        self._events.put(Event(solver, ended=outcome))


def _newest(updates: queue.SimpleQueue[Update]) -> Update | None:
    newest = None
    try:
        while True:
            update = updates.get_nowait()
            newest = update if newest is None else newest.updated(update)
    except queue.Empty:
        return newest
