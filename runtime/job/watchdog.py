"""Watchdog of a job: a rank that raises, dies or hangs ends every rank, with one line that names rank and cause.

Each rank has a thread that says in the launcher's store what the rank does. A rank that raises writes the fault there.
One that does nothing for a while (:mod:`runtime.job.stillness`) and is waited for accuses itself. One that waits in a
step for much longer than steps take looks who is behind: a rank without a sign of life, one that has not come to the
step, or one that does something else in it than wait. The first step may take as long as it likes, since it may
compile; so may writing, since a disk may be slow, but each piece that is written is a sign that it goes on
(:func:`progressed`). The first fault counts, and the rank that wrote it prints it; all others end soon after they have
read it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from math import inf
from types import TracebackType
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from runtime.job.local_processes import busy_seconds, kill, own_process, thread_busy_seconds
from runtime.job.process_group import LaunchError, broadcast_text, gather_texts
from runtime.job.signs import Longest, Sign
from runtime.job.stillness import Stillness

BEAT_SECONDS = 0.5
STEP_SECONDS = 15.0
"""Seconds for which a rank may do nothing, and least seconds of a step after which ranks look who is behind."""
STEP_SECONDS_VARIABLE = "MESHWRIGHT_STEP_SECONDS"
"""Environment variable with another number of seconds; 0: steps may take as long as they like (for a debugger)."""
TIMES_LONGEST = 4.0
"""The same as a multiple of the longest step."""
SILENT_SECONDS = 2.5
"""Without a sign of life for so long a rank is dead, or stopped."""
GRACE_SECONDS, EXIT_SECONDS = 3.0, 10
"""Time for a rank to end by itself after another's fault, and after its own."""
_STORE_SECONDS = 10.0
_LOST = ("gloo", "NCCL", "Connection", "Broken pipe", "TCPStore", "Socket", "socket")
"""In the messages of errors that another rank's end causes."""
_SILENT = re.compile(r"rank ([\d, ]+) of \d+ died or was stopped")


class RankFault(LaunchError):
    """The fault that ends a job; its message names the rank and the cause, and one rank has printed it."""

    printed = True


class WatchedThread:
    """A thread that goes on with what the main thread began; under watch from :meth:`begin` until :meth:`end`.

    It is a fault when it does nothing for :data:`STEP_SECONDS`; it reports each piece of work by :func:`progressed`.
    """

    def __init__(self) -> None:
        self._watchdog = _current
        self.what = "" if _current is None else _current.inside
        self.thread = 0
        self.stillness: Stillness | None = None

    def begin(self) -> None:
        """Watch the calling thread."""
        if self._watchdog is not None and self.stillness is None:
            self.thread = threading.get_ident()
            self.stillness = Stillness(self.thread, partial(thread_busy_seconds, threading.get_native_id()))
            self._watchdog.threads.append(self)

    def end(self) -> None:
        """End watching."""
        if self._watchdog is not None and self in self._watchdog.threads:
            self._watchdog.threads.remove(self)


class Watchdog:
    """A rank's watchdog, from its making until :meth:`stop`.

    Parameters
    ----------
    store
        A store of ``torch.distributed``, of this rank alone.
    rank, ranks
        This rank, and the number of all.
    least_seconds
        As :data:`STEP_SECONDS`; 0 accuses nobody.
    end
        Called with the fault when this rank has not left by itself; None: the process ends.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        least_seconds: float = STEP_SECONDS,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._rank, self._ranks, self._least = store, rank, ranks, least_seconds
        self._progress = self._depth = self._beat = self._waiting = 0
        self.inside = ""
        self.threads: list[WatchedThread] = []
        self._pieces: Counter[int] = Counter()
        self._awake = self._began = self._looked = self._asked = 0.0
        self._longest: dict[str, Longest] = {}
        self._is_limited, self._limit = True, inf
        self._main = threading.main_thread().ident or 0
        self._stillness = Stillness(self._main, busy_seconds)
        self._stopped, self._failing = threading.Event(), False
        self._end = end or self._leave
        self._process = own_process()
        with suppress(Exception):  # the thread says so where the store has failed
            self._say()
        self._thread = threading.Thread(target=self._run, name="meshwright-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(_STORE_SECONDS)

    @contextmanager
    def watching(self, kind: str, is_limited: bool = True) -> Iterator[None]:
        """What all ranks do together, and how long it may take: after the first of a kind not much longer than before.

        An outer one counts. Time during which the process was suspended does not. What is not limited may take as long
        as each rank does something.
        """
        if self._depth:
            yield
            return
        longest = self._longest.setdefault(kind, Longest())
        self._depth += 1
        self._progress += 1
        self._began = self._awake
        self._is_limited = is_limited
        self._limit = max(self._least, TIMES_LONGEST * longest.seconds) if is_limited and longest.count else inf
        self.inside = f"{kind} {longest.count + 1}"
        started = time.monotonic()
        try:
            yield
        finally:
            self.inside, self._depth = "", 0
            self._progress += 1
        longest.add(time.monotonic() - started)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What the main thread does meanwhile is to wait: for the device, or for a thread that is watched itself."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def progressed(self) -> None:
        """The calling thread has done a piece of its work."""
        self._pieces[threading.get_ident()] += 1

    def fault_of(self, error: BaseException) -> str:
        """The job's fault after this rank raised an error; this rank leaves soon, whatever still runs in it.

        An error that another rank's end causes is not the fault: who has ended is looked for.
        """
        self._failing = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(EXIT_SECONDS + int(2 * SILENT_SECONDS))
        said = "; ".join([*getattr(error, "__notes__", ()), str(error) or "no message"])
        reason = f"{type(error).__name__}: {' '.join(said.split())}"
        own = f"rank {self._rank} of {self._ranks} failed: {reason}"
        if not _is_lost(error):
            return self._claim(own)
        with suppress(Exception):
            deadline = time.monotonic() + SILENT_SECONDS
            while time.monotonic() < deadline:
                if fault := self._fault():
                    return fault
                time.sleep(BEAT_SECONDS / 5)
            if silent := self._silent():
                return self._claim(self._died(silent, SILENT_SECONDS))
        return self._claim(own)

    def _run(self) -> None:
        last = time.monotonic()
        read = None
        while not self._stopped.wait(BEAT_SECONDS):
            now = time.monotonic()
            self._awake += min(now - last, 2 * BEAT_SECONDS)
            last = now
            try:
                self._say()
                fault = self._fault()
                if not fault and self._least:
                    fault = self._judge()
            except Exception as error:
                if self._stopped.is_set() or not (self.inside or self.threads):
                    continue  # rank 0, which may have the store, ends like any other when its work is done
                lost = f"lost the job's store: its launcher or rank 0 has ended ({type(error).__name__})"
                fault = self._claim(f"rank {self._rank} of {self._ranks} {lost}")
            if fault and read is None:
                read = now
            if fault and read is not None and now - read > GRACE_SECONDS and not self._failing:
                self._end(fault)
                return

    def _say(self) -> None:
        self._beat += 1
        self._stillness.look(self._pieces[self._main], bool(self._waiting), self._awake)
        at, waits = self._stillness.at, self._stillness.waits
        is_first = self._is_limited and self._limit == inf
        sign = Sign(self._beat, self._progress, self.inside, is_first, at, waits, self._process)
        self._store.set(f"sign/{self._rank}", json.dumps(asdict(sign)))

    def _fault(self) -> str:
        return self._store.get("fault").decode() if self._store.check(["fault"]) else ""

    def _claim(self, fault: str) -> str:
        """The job's fault: this one, which is printed, if no other was first."""
        try:
            first: str = self._store.compare_set("fault", "", fault).decode()
        except Exception:  # without a store nobody else can say it
            first = fault
        if first == fault:
            print("meshwright:", fault, file=sys.stderr, flush=True)
        return first

    def _signs(self) -> list[Sign]:
        keys = [f"sign/{rank}" for rank in range(self._ranks)]
        return [
            Sign(**json.loads(self._store.get(key)))
            if self._store.check([key])
            else Sign(0, 0, "", False, "its start", False)
            for key in keys
        ]

    def _silent(self) -> list[int]:
        """Ranks without a sign of life."""
        before = self._signs()
        deadline = time.monotonic() + SILENT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS)
            if threading.current_thread() is self._thread:
                self._say()
        after = self._signs()
        return [k for k, (a, b) in enumerate(zip(before, after, strict=True)) if a.beat == b.beat]

    def _leave(self, fault: str) -> None:
        """End this process, and before it those of this machine that the fault says are stopped.

        A process that is stopped ends by no other signal than a kill, for which torch's launcher waits half a minute.
        """
        _write_error(RankFault(fault))
        if named := _SILENT.search(fault):
            with suppress(Exception):
                signs = self._signs()
                for rank in map(int, named[1].split(", ")):
                    kill(signs[rank].process)
        sys.stderr.flush()
        os._exit(1)

    def _died(self, silent: list[int], seconds: float) -> str:
        named = ", ".join(map(str, silent))
        return f"rank {named} of {self._ranks} died or was stopped: no sign of life for {seconds:.3g} s"

    def _judge(self) -> str:
        """The fault of a rank that does nothing, or of what takes too long, if there is one."""
        if self._stillness.idle > self._least and self._awake - self._asked > SILENT_SECONDS:
            self._asked = self._awake
            if fault := self._accuse_itself():
                return fault
        for thread in tuple(self.threads):
            if (still := thread.stillness) is not None:
                still.look(self._pieces[thread.thread], False, self._awake)
                if still.idle > self._least:
                    return self._claim(self._stands("in", thread.what, still))
        if self.inside and self._awake - self._began > self._limit:
            return self._accuse()
        return self._accuse_silent()

    def _accuse_itself(self) -> str:
        """The fault of a rank, this one, that does nothing, where somebody waits for it or it writes.

        Somebody who computes, compiles or writes uses a processor or reports progress. Where nobody waits, all may do
        the same, such as to read from a slow disk. Before the first of a kind a rank may read its first batch.
        """
        inside, progress = self.inside, self._progress
        waiting = [sign for sign in self._signs() if sign.waits]
        ahead = [s for s in waiting if s.progress > progress and (inside or (s.inside and not s.first))]
        ahead += [sign for sign in waiting if inside and sign.inside == inside]
        writes = inside and not self._is_limited
        if self._progress != progress or not (ahead or writes):
            return ""
        return self._claim(self._stands("in" if inside else "outside", inside or ahead[0].inside, self._stillness))

    def _stands(self, place: str, what: str, still: Stillness) -> str:
        done = f"has done nothing for {still.idle:.0f} s, at {still.at}"
        return f"rank {self._rank} of {self._ranks} hangs {place} {what}: it {done}"

    def _accuse_silent(self) -> str:
        """Look from time to time, in what takes long, who gives no sign of life."""
        progress, threads = self._progress, tuple(self.threads)
        if not (self.inside or threads):
            self._looked = self._awake
        if self._awake - max(self._looked, self._began) < self._least:
            return ""
        silent = self._silent()
        self._looked = self._awake
        is_over = self._progress != progress or tuple(self.threads) != threads
        return self._claim(self._died(silent, SILENT_SECONDS)) if silent and not is_over else ""

    def _hangs(self, ranks: list[int], signs: list[Sign], place: str) -> str:
        where = "; ".join(f"rank {rank} is at {signs[rank].at}" for rank in ranks[:4])
        named, seconds = ", ".join(map(str, ranks)), self._awake - self._began
        began_by = f"which rank {self._rank} began {seconds:.0f} s ago"
        return f"rank {named} of {self._ranks} hangs {place} {self.inside}, {began_by}; {where}"

    def _accuse(self) -> str:
        inside, began = self.inside, self._began
        silent, signs = self._silent(), self._signs()
        if self.inside != inside or self._began != began:
            return ""  # it has come to an end meanwhile
        if silent:
            return self._claim(self._died(silent, SILENT_SECONDS))
        least = min(sign.progress for sign in signs)
        behind = [rank for rank, sign in enumerate(signs) if sign.progress == least]
        behind = [rank for rank in behind if not signs[rank].waits] or behind
        return self._claim(self._hangs(behind, signs, "outside" if least < self._progress else "in"))


_Client: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch exports them from a binary module
_Prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
_current: Watchdog | None = None


def watch() -> None:
    """Start this rank's watchdog; a collective of all ranks, which a launcher started.

    An error that nobody catches is written as the job's fault from then on.
    """
    global _current
    if _current is not None or dist.get_world_size() == 1:
        return
    timeout, store = timedelta(seconds=_STORE_SECONDS), None
    with suppress(dist.DistError, KeyError, ValueError):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = _Client(host, port, None, False, timeout=timeout, wait_for_workers=False)
    prefix = broadcast_text(f"meshwright-{uuid4().hex}")
    if "" in gather_texts("" if store is None else prefix) or store is None:
        return  # the group was made in another way
    own = _Prefixed(prefix, store)
    least = float(os.environ.get(STEP_SECONDS_VARIABLE, STEP_SECONDS))
    _current = Watchdog(own, dist.get_rank(), dist.get_world_size(), least)
    process, show = os.getpid(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _is_lost(error):
            show(kind, error, trace)
        if os.getpid() == process and _current is not None and not isinstance(error, (KeyboardInterrupt, RankFault)):
            _write_error(RankFault(_current.fault_of(error)))

    sys.excepthook = hook


def progressed() -> None:
    """Report that the calling thread has done a piece of its work; see :meth:`Watchdog.progressed`."""
    if _current is not None:
        _current.progressed()


@contextmanager
def waiting() -> Iterator[None]:
    """Waiting for the device or for a watched thread; see :meth:`Watchdog.waiting`."""
    if _current is None:
        yield
        return
    with _current.waiting():
        yield


def item_of(scalar: Tensor) -> float:
    """Number of a tensor, for which the device is waited for, and so are the other ranks on CUDA."""
    with waiting():
        return scalar.item()


def wait_for(work: Any) -> None:
    """Wait for a transfer of ``torch.distributed`` that another rank takes part in."""
    with waiting():
        work.wait()


def leave() -> None:
    """End this rank's watchdog."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


@contextmanager
def watched(kind: str, is_limited: bool = True) -> Iterator[None]:
    """A step, or anything else that all ranks do together; see :meth:`Watchdog.watching`."""
    if _current is None:
        yield
        return
    with _current.watching(kind, is_limited):
        yield


@contextmanager
def faults_named() -> Iterator[None]:
    """Turn an error into the job's fault, where a watchdog runs.

    Raises
    ------
    RankFault
        In the place of the error; its message is the same line on every rank.
    """
    try:
        yield
    except Exception as error:
        if _current is None or isinstance(error, RankFault):
            raise
        raise RankFault(_current.fault_of(error)) from error


def _is_lost(error: BaseException) -> bool:
    """Whether an error may be the end of another rank."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        if isinstance(seen, RuntimeError) and any(word in str(seen) for word in _LOST):
            return True
        if type(seen).__name__ in ("CheckpointException", "CheckpointError") and "Connection" in str(seen):
            return True
        seen = seen.__cause__
    return False


def _write_error(error: RankFault) -> None:
    """Write the fault where torch's launcher looks for it."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        with suppress(Exception):
            get_error_handler().record_exception(error)
