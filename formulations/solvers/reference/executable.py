"""Any executable that follows the protocol of the solver contest (:mod:`formulations.instances.contest`).

It is called with the path of a problem in the contest's JSON and a time limit in whole seconds. The last line that it
prints is the list of strategy indices, such as ``[0, 2, 1]``, or ``[]`` where it found nothing; lines before are
ignored. It proves nothing, so its claim is an assignment without a bound.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from formulations.instances.contest_form import ContestForm, contest_form, write_contest_problem
from formulations.problem.solution import Claim, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_OVERTIME_SECONDS = 0.5
"""Not tunable: time after its limit at which the executable is ended, before its worker is."""
_SHOWN = 200
"""Not tunable: characters of output that a message has."""


class ExecutableError(RuntimeError):
    """An executable that gave no list of strategies; the message says what it did instead."""


def solve(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    path: str,
) -> Claim:
    """Run the executable at ``path`` on a problem in the contest's form.

    The time limit that it is given is what is left after the problem is written, at least one second; it is ended
    half a second after the limit.
    """
    started = time.monotonic()
    form = contest_form(problem)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        file = Path(folder) / "problem.json"
        write_contest_problem(file, form.problem)
        left = options.time_limit - (time.monotonic() - started)
        try:
            choices = _strategies(*_run([path, str(file), str(max(1, int(left)))], left), form)
        except ExecutableError as error:
            return Claim(None, None, message=f"{Path(path).name} {error}")
    return Claim(choices, None, message="" if choices is not None else f"{Path(path).name} printed [], no solution")


def _run(command: Sequence[str], seconds: float) -> tuple[list[str], str]:
    """Return the lines that the executable printed, and how it failed or an empty string."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        except OSError as error:
            raise ExecutableError(f"cannot be started: {error.strerror}") from error
        failure = ""
        try:
            code = process.wait(timeout=max(0.0, seconds) + _OVERTIME_SECONDS)
            if code:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                failure = f"ended with {how}"
        except subprocess.TimeoutExpired:
            failure = f"did not end within its time limit of {command[-1]} s"
        finally:
            process.kill()
            process.wait()
        said = _lines(errors)[-1:]
        return _lines(output), ": ".join([failure, *(line[-_SHOWN:] for line in said)]) if failure else ""


def _strategies(lines: Sequence[str], failure: str, form: ContestForm) -> tuple[int, ...] | None:
    """Return the assignment of the given problem in the last line; None for an empty list."""
    last = lines[-1] if lines else ""
    try:
        found = json.loads(last)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(type(choice) is int for choice in found):
        if failure:
            raise ExecutableError(failure)
        shown = last if len(last) <= _SHOWN else last[:_SHOWN] + "..."
        raise ExecutableError(f"must print a list of strategies such as [0, 2, 1] as its last line, got {shown!r}")
    if failure and not found:
        raise ExecutableError(failure)
    nodes = form.problem.nodes
    if found and len(found) != len(nodes):
        raise ExecutableError(f"chose {len(found)} strategies; the problem has {len(nodes)} nodes")
    for i, (choice, node) in enumerate(zip(found, nodes, strict=False)):
        if not 0 <= choice < node.size:
            raise ExecutableError(f"chose strategy {choice} at node {i}, which has {node.size}")
    return form.restrict(found) if found else None


def _lines(file: IO[bytes]) -> list[str]:
    """Return the lines of a file that are not empty."""
    file.seek(0)
    return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
