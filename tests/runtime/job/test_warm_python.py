"""The executable that tests launch in the place of an interpreter behaves as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPORT = """
import json, os, sys
print(json.dumps([sys.argv, os.environ["COLOUR"], os.getcwd(), "torch" in sys.modules, __name__]))
print("to the other stream", file=sys.stderr)
sys.exit(3)
"""
SLEEP = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def started(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A process that sleeps, and the number by which it knows itself."""
    place = folder / "pid"
    process = subprocess.Popen([sys.executable, str(script(folder, SLEEP)), str(place)])
    while not (place.exists() and place.read_text()):
        time.sleep(0.02)
    return process, int(place.read_text())


def test_arguments_environment_folder_and_end_are_passed_on(tmp_path: Path) -> None:
    command = [sys.executable, "-u", str(script(tmp_path, REPORT)), "one", "two"]
    environment = {**os.environ, "COLOUR": "blue"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert ended.returncode == 3
    arguments, colour, folder, is_warm, name = json.loads(ended.stdout)
    assert arguments == [command[2], "one", "two"]
    assert (colour, folder, is_warm, name) == ("blue", str(tmp_path), True, "__main__")
    assert ended.stderr == "to the other stream\n"


def test_an_error_is_shown_and_ends_with_one(tmp_path: Path) -> None:
    command = [sys.executable, str(script(tmp_path, "raise ValueError('no luck')"))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: no luck\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it(number: signal.Signals, tmp_path: Path) -> None:
    process, child = started(tmp_path)
    process.send_signal(number)
    assert process.wait(20) == -number
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_program_text_has_an_interpreter_of_its_own() -> None:
    code = "import sys; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
