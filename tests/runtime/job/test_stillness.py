"""Threads that do nothing, and others that look as if they did."""

from __future__ import annotations

import threading
import time

import pytest

from runtime.job.local_processes import thread_busy_seconds
from runtime.job.stillness import Stillness

CODE = "def stand(sleep):\n    sleep()\n"


def looked_at(function, progress=lambda look: 0, busy=None):
    """Seconds for which a thread that runs a function of an event has done nothing, and its last look."""
    over, started, native = threading.Event(), threading.Event(), []

    def run():
        native.append(threading.get_native_id())
        started.set()
        function(over)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    time.sleep(0.05)
    still = Stillness(thread.ident, busy or (lambda: thread_busy_seconds(native[0])))
    for look in range(4):
        still.look(progress(look), False, float(look))
        time.sleep(0.1)
    over.set()
    thread.join()
    return still


def in_file(name):
    """A function that waits in a file of some name."""
    space = {}
    exec(compile(CODE, name, "exec"), space)
    return lambda over: space["stand"](over.wait)


def test_a_thread_that_sleeps_does_nothing_since_the_second_look():
    assert looked_at(threading.Event.wait).idle == 2.0


def test_a_thread_that_reports_pieces_or_computes_does_something():
    assert looked_at(threading.Event.wait, progress=lambda look: look).idle == 0.0
    assert looked_at(threading.Event.wait, busy=iter(range(9)).__next__).idle == 0.0


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        ("/lib/torch/distributed/distributed_c10d.py", True),
        ("/lib/torch/distributed/checkpoint/filesystem.py", False),
        ("model.py", False),
    ],
)
def test_a_thread_in_a_collective_waits(file, waits):
    still = looked_at(in_file(file))
    assert still.waits == waits
    assert still.idle == (0.0 if waits else 2.0)
    assert still.at
