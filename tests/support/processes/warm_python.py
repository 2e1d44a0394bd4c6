"""Python processes that begin with torch imported: forked from one that has it, in the place of fresh interpreters.

A rank imports for three to five seconds and then runs for one, so most of the time of tests that launch jobs was that
of imports. :class:`WarmPython` is an executable in the place of ``sys.executable``. It takes what a launcher gives a
rank (arguments, environment, working directory, cores, standard streams, network namespace), lets a process that was
started beforehand fork, hands signals on and ends as the forked process does. What it is not asked to keep warm it
executes as it is. Tests marked ``cold_python`` have interpreters of their own.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODULES = (
    "runtime.rank_main",
    "runtime.layer_main",
    "runtime.train_main",
    "runtime.measure.reference",
    "runtime.layers.reference",
    "runtime.commands.main",
    "runtime.gpu_check",
    "torch.distributed.run",
)
"""What is run warm by ``-m``; scripts are as well."""

IMPORTED = (
    *MODULES,
    "runtime.gpu_check.__main__",
    "runtime.library",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bert", "t5", "vit")),
)
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
_STREAMS = 3
_CLONE_NEWNET = 0x40000000

CLIENT = """#!{python} -ISB
import array, json, os, select, signal, socket, sys
arguments = [each for each in sys.argv[1:] if each != "-u"]
known = arguments[:1] == ["-m"] and arguments[1] in {modules!r}
if not known and not arguments[0].endswith(".py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
arguments = arguments[known:]
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
network = os.open("/proc/self/ns/net", os.O_RDONLY)
asked = json.dumps([arguments, dict(os.environ), os.getcwd(), list(os.sched_getaffinity(0))]).encode()
descriptors = array.array("i", [0, 1, 2, network])
server.sendmsg([len(asked).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
server.sendall(asked)
answers = server.makefile("rb")
child = int(answers.readline())
def forward(number, frame):
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass
for number in {signals!r}:
    signal.signal(number, forward)
if arguments[0].endswith(".reference"):  # ends with the one that started it
    parent = os.getppid()
    while not select.select([server], [], [], 0.5)[0]:
        if os.getppid() != parent:
            os._exit(1)
status = answers.readline()
ended = os.waitstatus_to_exitcode(int(status)) if status else -signal.SIGKILL
if ended < 0:
    signal.signal(-ended, signal.SIG_DFL) if -ended != signal.SIGKILL else None
    os.kill(os.getpid(), -ended)
os._exit(ended)
"""


class WarmPython:
    """An executable that is used as ``sys.executable``, and the process that forks for it.

    Parameters
    ----------
    folder
        For the executable and the socket between them.

    Attributes
    ----------
    executable
        Path of the executable.
    """

    def __init__(self, folder: Path) -> None:
        address = folder / "warm"
        self.executable = folder / "python"
        text = CLIENT.format(
            python=sys.executable, modules=MODULES, address=str(address), signals=[int(each) for each in _FORWARDED]
        )
        self.executable.write_text(text, encoding="utf-8")
        self.executable.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen(64)
        command = [sys.executable, "-m", __name__, str(listener.fileno()), str(self.executable)]
        self._process = subprocess.Popen(
            command, pass_fds=[listener.fileno()], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": _paths()}
        )
        listener.close()

    def close(self) -> None:
        """End the process; those that it forked end with the ones that asked for them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _paths() -> str:
    return os.pathsep.join(filter(None, sys.path))


def serve(listener: socket.socket, executable: str) -> None:
    """Fork for every request until standard input ends; returns in forked processes alone, to run what was asked."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forked processes do not copy what they only look at
    own_path = [*sys.path]
    while True:
        connection, _ = listener.accept()
        # A process between asks, waits and reports, so that this one goes on at once.
        if os.fork():
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            continue
        listener.close()
        asked, descriptors = _receive(connection)
        child = os.fork()
        if child:
            for descriptor in descriptors:
                os.close(descriptor)
            _watch(connection, child)
        connection.close()
        _become(asked, descriptors, executable, own_path)
        return


def _receive(connection: socket.socket) -> tuple[list[Any], Sequence[int]]:
    found = array.array("i")
    size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_LEN((_STREAMS + 1) * found.itemsize))
    for _, _, content in ancillary:
        found.frombytes(content)
    left, parts = int.from_bytes(size, "little"), []
    while left:
        parts.append(connection.recv(left))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), list(found)


def _watch(connection: socket.socket, child: int) -> None:
    """Report the child's end, and end it where who asked for it is gone."""
    connection.sendall(f"{child}\n".encode())

    waited = threading.Event()

    def end_with_asker() -> None:
        if not connection.recv(1) and not waited.is_set():
            os.kill(child, signal.SIGKILL)

    threading.Thread(target=end_with_asker, daemon=True).start()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    waited.set()
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _become(asked: list[Any], descriptors: Sequence[int], executable: str, own_path: Sequence[str]) -> None:
    """Take over streams, environment, working directory, cores, arguments and network of who asked."""
    arguments, environment, folder, cores = asked
    os.sched_setaffinity(0, cores)
    for stream, descriptor in enumerate(descriptors[:_STREAMS]):
        os.dup2(descriptor, stream)
    network = descriptors[_STREAMS]
    if os.stat(f"/proc/self/fd/{network}").st_ino != os.stat("/proc/self/ns/net").st_ino:
        assert ctypes.CDLL(None).setns(network, _CLONE_NEWNET) == 0, "the network namespace cannot be entered"
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    script = arguments[0].endswith(".py")
    first = str(Path(arguments[0]).resolve().parent) if script else folder
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *own_path]
    sys.executable, sys.argv = executable, arguments
    for number in _FORWARDED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _end_with_input() -> None:
    os.read(0, 1)
    os._exit(0)


def _main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        serve(listener, sys.argv[2])
    sys.modules.pop(sys.argv[0], None)  # or runpy warns that it was imported before
    code: object = 0
    try:
        if sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code
    except BaseException as error:  # as the interpreter would end
        sys.excepthook(type(error), error, error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)  # taking down what was imported would copy all of it


if __name__ == "__main__":
    _main()
