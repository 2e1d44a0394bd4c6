"""Watchdogs of a job, here threads of one process with one store: which rank is named, and that one line is printed."""

from __future__ import annotations

import re
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from runtime.job import launch, watchdog
from runtime.job.process_group import LaunchError
from runtime.job.signs import Sign
from runtime.job.watchdog import Watchdog, WatchedThread
from runtime.library import writing

BEATS = count(1)


@pytest.fixture
def job(monkeypatch):
    """Two ranks whose steps may last 0.3 s, the faults with which they ended, and the seconds until they must leave."""
    for name, value in {"BEAT_SECONDS": 0.05, "SILENT_SECONDS": 0.25, "GRACE_SECONDS": 0.1}.items():
        monkeypatch.setattr(watchdog, name, value)
    # Processes of other tests, which this one has started too, may use a processor.
    monkeypatch.setattr(watchdog, "busy_seconds", partial(watchdog.thread_busy_seconds, threading.get_native_id()))
    ended, alarms = {}, []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    store = dist.HashStore()
    ranks = [Watchdog(store, rank, 2, 0.3, lambda fault, rank=rank: ended.update({rank: fault})) for rank in (0, 1)]
    yield SimpleNamespace(ranks=ranks, ended=ended, alarms=alarms)
    for rank in ranks:
        rank.stop()


def first_step(job):
    """The one that may take as long as it likes."""
    for rank in job.ranks:
        with rank.watching("step"):
            time.sleep(0.01)


def wait_for_end(job, *ranks):
    deadline = time.monotonic() + 10
    while set(job.ended) != set(ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(job.ended) == set(ranks)


def test_a_rank_that_does_not_come_to_a_step_is_named(job, capfd):
    first_step(job)
    with job.ranks[0].watching("step"):
        wait_for_end(job, 0, 1)
    (fault,) = set(job.ended.values())
    assert re.fullmatch(
        r"rank 1 of 2 hangs outside step 2, which rank 0 began \d s ago; rank 1 is at \w+.py:\d+ in \w+", fault
    )
    assert capfd.readouterr().err == f"meshwright: {fault}\n"


def test_a_rank_without_a_sign_of_life_is_named(job, capfd):
    first_step(job)
    job.ranks[1].stop()
    with job.ranks[0].watching("step"):
        wait_for_end(job, 0)
    assert job.ended[0] == "rank 1 of 2 died or was stopped: no sign of life for 0.25 s"
    assert capfd.readouterr().err.count("meshwright: rank 1") == 1


def test_an_error_is_the_fault_and_what_it_causes_elsewhere_is_not(job, capfd):
    error = ValueError("the disk\nis full")
    error.add_note("rank 1 wrote")
    fault = job.ranks[1].fault_of(error)
    assert fault == "rank 1 of 2 failed: ValueError: rank 1 wrote; the disk is full"
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9")
    assert job.ranks[0].fault_of(lost) == fault
    assert capfd.readouterr().err == f"meshwright: {fault}\n"
    assert len(job.alarms) == 2
    assert min(job.alarms) > 0
    time.sleep(0.4)
    assert job.ended == {}  # both leave by themselves, or by their alarms


def test_the_death_of_a_rank_is_no_fault_of_the_one_that_sees_it(job):
    job.ranks[1].stop()
    assert job.ranks[0].fault_of(RuntimeError("Connection reset by peer")).startswith("rank 1 of 2 died")


def test_long_steps_end_no_job_where_all_are_long(job):
    first_step(job)
    for rank in job.ranks:
        rank._longest["step"].seconds = 1.0
    with job.ranks[0].watching("step"), job.ranks[0].watching("evaluation"), job.ranks[1].watching("step"):
        time.sleep(1.0)
    assert job.ended == {}
    assert "evaluation" not in job.ranks[0]._longest


NOTHING = r"it has done nothing for \d s, at \w+.py:\d+ in \w+"


@pytest.mark.parametrize(
    ("inside", "other", "fault"),
    [
        ("step", {"inside": "step 1", "waits": True}, "in step 1"),
        ("step", {"inside": "step 1"}, ""),  # all do the same
        ("step", {"waits": True}, ""),  # it has not come to the step
        ("step", {"waits": True, "progress": 2}, "in step 1"),  # it is behind it, such as before the next batch
        ("step", {"inside": "checkpoint 1", "waits": True, "progress": 2, "first": True}, "in step 1"),
        ("", {"inside": "step 2", "waits": True}, "outside step 2"),
        ("", {"inside": "step 2"}, ""),
        ("", {"waits": True, "progress": 2}, ""),  # in a collective of the user's own
        ("", {"inside": "step 1", "waits": True, "first": True}, ""),  # it may read its first batch
        ("export", {}, "in export 1"),
    ],
)
def test_a_rank_that_does_nothing_is_named_where_it_is_waited_for(inside, other, fault, job):
    """Rank 0, which sleeps, by the sign of rank 1."""
    job.ranks[1].stop()
    said = Sign(0, **{"progress": 1, "inside": "", "first": False, "at": "", "waits": False, **other})
    signs = [said, said]
    job.ranks[0]._signs = lambda: [replace(sign, beat=next(BEATS)) for sign in signs]
    with job.ranks[0].watching(inside, is_limited=inside == "step") if inside else nullcontext():
        if fault:
            wait_for_end(job, 0)
            assert re.fullmatch(f"rank 0 of 2 hangs {fault}: {NOTHING}", job.ended[0])
        else:
            time.sleep(1.0)
    assert bool(job.ended) == bool(fault)


def test_a_rank_that_waits_for_its_device_does_not_hang(job):
    with job.ranks[0].waiting(), job.ranks[1].waiting(), job.ranks[0].watching("export", is_limited=False):
        time.sleep(1.0)
    assert job.ended == {}


@pytest.fixture
def written(job, monkeypatch, tmp_path):
    """A file of the first rank whose pieces of 4 bytes are on the disk when a function returns."""
    monkeypatch.setattr(watchdog, "_current", job.ranks[0])
    monkeypatch.setattr(writing, "PIECE_BYTES", 4)
    with writing.SyncedFile(tmp_path / "file", "wb") as file:
        yield file


def test_a_slow_disk_is_no_fault(job, written, monkeypatch):
    monkeypatch.setattr(writing.os, "fsync", lambda _: time.sleep(0.1))
    with job.ranks[0].watching("write of checkpoint", is_limited=False):
        assert written.write(bytes(range(64))) == 64
    assert job.ended == {}
    assert Path(written.name).read_bytes() == bytes(range(64))


@pytest.mark.parametrize("beside", [False, True])
def test_a_disk_that_stands_still_is_a_fault(beside, job, written, monkeypatch):
    over = Event()
    monkeypatch.setattr(writing.os, "fsync", lambda _: over.wait(10))
    with job.ranks[0].watching("write of checkpoint", is_limited=False):
        thread = WatchedThread()
        if not beside:
            ending = Thread(target=lambda: (wait_for_end(job, 0, 1), over.set()))
            ending.start()
            written.write(bytes(4))
            ending.join()

    def write() -> None:
        thread.begin()
        written.write(bytes(64))
        thread.end()

    if beside:
        writer = Thread(target=write)
        writer.start()
        with job.ranks[0].waiting():
            wait_for_end(job, 0, 1)
        over.set()
        writer.join()
        assert job.ranks[0].threads == []
    wait_for_end(job, 0, 1)
    fault = rf"rank 0 of 2 hangs in write of checkpoint 1: {NOTHING}"
    assert all(re.fullmatch(fault, said) for said in job.ended.values())


def test_a_rank_that_stops_while_others_write_is_named(job):
    job.ranks[1].stop()
    with job.ranks[0].watching("export", is_limited=False), job.ranks[0].waiting():
        wait_for_end(job, 0)
    assert job.ended[0].startswith("rank 1 of 2 died or was stopped")


def test_a_job_that_fails_is_started_again_as_often_as_allowed(monkeypatch, capsys):
    faults, started = ["rank 1 of 2 failed: Signal 9 (SIGKILL)", "rank 0 of 2 failed: OSError: disk", ""], []

    def launched(module, ranks, arguments, logs, report):
        started.append(logs.name)
        report.write_text("{}")
        return faults[len(started) - 1]

    monkeypatch.setattr(launch, "_launch", launched)
    options = {"steps": 1, "check": False, "data": None, "device": "cpu"}
    run = partial(launch.run_module, "module", 2, lambda path: None, **options)
    with pytest.raises(LaunchError, match="rank 0 of 2 failed: OSError: disk"):
        run(max_restarts=1)
    assert capsys.readouterr().err == "meshwright: rank 1 of 2 failed: Signal 9 (SIGKILL); restart 1 of 1\n"
    started.clear()
    assert run(max_restarts=2) == "{}"
    assert started == ["logs-0", "logs-1", "logs-2"]


def failure(code, message, rank=0, at=0):
    return SimpleNamespace(exitcode=code, message=message, local_rank=rank, timestamp=at)


STOPPED = {"message": "RankFault: rank 1 of 2 died or was stopped"}


def test_what_a_process_said_before_it_aborted_is_named(tmp_path):
    (tmp_path / "1").mkdir()
    said = "terminate called after throwing an instance of 'Fault'\n  what():  no buffer\nFatal Python error: Aborted\n"
    (tmp_path / "1" / "stderr.log").write_text(
        f"the beginning\n{said}\nThread 0x7f:\n  File ...\nExtension modules: a, b"
    )
    error = SimpleNamespace(failures={1: failure(-6, "Signal 6 (SIGABRT)", 1)})
    assert launch._fault(error, 2, tmp_path) == (
        "rank 1 of 2 failed: Signal 6 (SIGABRT); its last lines: terminate called after throwing an instance of "
        "'Fault'; what():  no buffer; Fatal Python error: Aborted"
    )


KILLED = ", which is how the operating system ends a process where memory runs out"


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({0: failure(1, STOPPED)}, "rank 1 of 2 died or was stopped"),
        ({0: failure(1, STOPPED, at=7), 1: failure(-9, "Signal 9", 1, at=7)}, "rank 1 of 2 died or was stopped"),
        (
            {0: failure(1, STOPPED, at=7), 1: failure(-9, "Signal 9", 1, at=4)},
            f"rank 1 of 2 failed: Signal 9{KILLED}; its last line: the end",
        ),
        (
            {0: failure(1, {"message": "RuntimeError: Connection\nclosed"}), 1: failure(-9, "Signal 9 (SIGKILL)", 1)},
            f"rank 1 of 2 failed: Signal 9 (SIGKILL){KILLED}; its last line: the end",
        ),
        (
            {0: failure(-15, "Signal 15 (SIGTERM)"), 1: failure(1, {"message": "ValueError: two\n lines"})},
            "rank 1 of 2 failed: ValueError: two lines",
        ),
    ],
)
def test_the_cause_is_what_is_said(failures, expected, tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stderr.log").write_text("the beginning\nthe end\n")
    first = next(rank for rank, entry in failures.items() if entry.exitcode != -15)
    error = SimpleNamespace(failures=failures, get_first_failure=lambda: (first, failures[first]))
    assert launch._fault(error, 2, tmp_path) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-restarts", 2), "--max-restarts: 2 needs checkpoints to go on from; add --checkpoints FOLDER"),
        (("--every", 5), "--every: 5 needs checkpoints"),
        (("--checkpoints", "here", "--check"), "--checkpoints: a run that is kept is neither compared nor timed"),
    ],
)
def test_restarts_need_checkpoints(arguments, message, meshwright, tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    ended = meshwright("run", tmp_path / "plan.json", *arguments)
    assert ended.code == 2
    assert message in ended.err
