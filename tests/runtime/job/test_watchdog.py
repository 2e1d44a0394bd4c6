"""Watchdogs of a job, here threads of one process with one store: which rank is named, and that one line is printed."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from runtime.job import watchdog
from runtime.job.watchdog import Watchdog


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
    assert fault.startswith("rank 1 of 2: have not come to step 2 after 0 s; rank 1 is at test_watchdog.py:")
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
