"""Watchdogs of a job, here threads of one process with one store: which rank is named, and that one line is printed."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from runtime.job import launch, watchdog
from runtime.job.process_group import LaunchError
from runtime.job.watchdog import Sign, Watchdog


@pytest.fixture
def job(monkeypatch):
    """Two ranks whose steps may last 0.3 s, the faults with which they ended, and the seconds until they must leave."""
    for name, value in {"BEAT_SECONDS": 0.05, "SILENT_SECONDS": 0.25, "GRACE_SECONDS": 0.1}.items():
        monkeypatch.setattr(watchdog, name, value)
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
        rank._times["step"].append(1.0)
    with job.ranks[0].watching("step"), job.ranks[0].watching("evaluation"), job.ranks[1].watching("step"):
        time.sleep(1.0)
    assert job.ended == {}
    assert "evaluation" not in job.ranks[0]._times


@pytest.mark.parametrize(
    ("later", "fault"),
    [
        ({}, "rank 1 of 2 hangs in step 1, which rank 0 began 1 s ago; rank 1 is at a.py:1 in f"),
        ({"busy": 5.2}, ""),  # it computes, or what it started does
        ({"at": "a.py:2 in f"}, ""),
        ({"waits": True}, ""),
        ({"inside": ""}, ""),  # it may read its first batch
        ({"beat": 1}, "rank 1 of 2 died or was stopped: no sign of life for 0.4 s"),
    ],
)
def test_who_does_nothing_in_the_first_step_is_named(later, fault, capfd):
    store, least = dist.HashStore(), 0.3
    rank = Watchdog(store, 0, 2, least, lambda _: None)
    rank.stop()

    def say(number, **changes):
        sign = Sign(changes.pop("beat", 1), 1, changes.pop("inside", "step 1"), changes.pop("at", "a.py:1 in f"), False)
        store.set(f"sign/{number}", json.dumps(asdict(replace(sign, **{"busy": 5.0, **changes}))))

    with rank.watching("step"):
        say(0, waits=True)
        say(1)
        rank._awake = 0.1
        assert rank._judge() == ""
        rank._awake = 0.8
        assert rank._judge() == ""
        say(0, waits=True, beat=2)
        say(1, **{"beat": 2, **later})
        assert rank._judge() == ""  # it looks again only after a while
        rank._awake = 1.2
        assert rank._judge() == fault
    assert capfd.readouterr().err == (f"meshwright: {fault}\n" if fault else "")


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


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({0: failure(1, STOPPED)}, "rank 1 of 2 died or was stopped"),
        ({0: failure(1, STOPPED, at=7), 1: failure(-9, "Signal 9", 1, at=7)}, "rank 1 of 2 died or was stopped"),
        (
            {0: failure(1, STOPPED, at=7), 1: failure(-9, "Signal 9", 1, at=4)},
            "rank 1 of 2 failed: Signal 9; its last line: the end",
        ),
        (
            {0: failure(1, {"message": "RuntimeError: Connection\nclosed"}), 1: failure(-9, "Signal 9 (SIGKILL)", 1)},
            "rank 1 of 2 failed: Signal 9 (SIGKILL); its last line: the end",
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
