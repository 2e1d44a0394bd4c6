"""Names of processes: the one that has the name is killed, stopped or not, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from runtime.job.local_processes import busy_seconds, kill, own_process, thread_busy_seconds

SCRIPT = """
import sys, time
from runtime.job.local_processes import own_process
print(own_process(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def child():
    started = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    yield started, started.stdout.readline().strip()
    started.kill()
    started.communicate()


def test_a_stopped_process_is_killed(child):
    started, name = child
    started.send_signal(signal.SIGSTOP)
    kill(name)
    assert started.wait(10) == -signal.SIGKILL


def test_a_process_of_another_start_or_machine_is_left(child):
    started, name = child
    boot, space, identifier, start = name.split()
    assert int(identifier) == started.pid
    for other in (
        f"{boot} {space} {identifier} {int(start) - 1}",
        f"other {space} {identifier} {start}",
        "",
        "nothing",
    ):
        kill(other)
    with pytest.raises(subprocess.TimeoutExpired):
        started.wait(0.2)
    assert own_process() not in ("", name)


def test_processes_at_work_count_and_those_at_rest_do_not(child):
    before = busy_seconds()
    work = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    at_work = subprocess.Popen([sys.executable, "-c", work], start_new_session=True)
    try:
        deadline = time.monotonic() + 60.0
        while busy_seconds() - before < 1.0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert busy_seconds() - before >= 1.0
    finally:
        os.killpg(at_work.pid, signal.SIGKILL)
        at_work.wait()


def test_a_thread_has_its_own_seconds():
    rest, over = [], threading.Event()

    def sleep():
        rest.append(threading.get_native_id())
        over.wait()

    thread = threading.Thread(target=sleep)
    thread.start()
    own, deadline = threading.get_native_id(), time.monotonic() + 60.0
    before = thread_busy_seconds(own)
    while thread_busy_seconds(own) - before < 0.2 and time.monotonic() < deadline:
        sum(range(10_000))
    assert thread_busy_seconds(own) - before >= 0.2
    assert thread_busy_seconds(rest[0]) < 0.1
    over.set()
    thread.join()
