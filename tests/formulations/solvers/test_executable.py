"""Executables of the contest's protocol: what they find is checked, and each way to fail is one clear message."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.problems.random_problems import random_problem

from formulations.instances.contest_form import contest_form
from formulations.problem.solution import SolveOptions, Status
from formulations.solvers import SolverPool, solve
from formulations.solvers.protocol.registry import UnknownSolverError, find_solver

pytestmark = pytest.mark.cold_workers

PROBLEM = random_problem(3, "tiny")


@pytest.fixture(scope="module")
def pool() -> Iterator[SolverPool]:
    with SolverPool() as shared:
        yield shared


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "own.sh"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return f"exe:{path}"

    return write


def test_an_optimum_in_the_contests_form_is_that_of_the_problem(script, pool: SolverPool) -> None:
    best = solve(PROBLEM, "brute_force", pool=pool)
    assert best.status is Status.OPTIMAL
    assert best.choices is not None
    whole = list(contest_form(PROBLEM).extend(best.choices))
    name = script(f'test -s "$1" || exit 9; echo "seconds $2"; echo "[9, 9]"; echo "{whole}"')
    result = solve(PROBLEM, name, SolveOptions(time_limit=7.5), pool=pool)
    assert (result.choices, result.objective) == (best.choices, best.objective)
    assert (result.status, result.bound, result.message) == (Status.FEASIBLE, None, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo started; echo out of luck >&2; exit 3", "own.sh ended with exit code 3: out of luck"),
        ("kill -SEGV $$", "own.sh ended with signal SIGSEGV"),
        ("echo '[0, 1'", "own.sh must print a list of strategies such as [0, 2, 1] as its last line, got '[0, 1'"),
        ("", "own.sh must print a list of strategies such as [0, 2, 1] as its last line, got ''"),
        ("echo '[true]'", "own.sh must print a list of strategies such as [0, 2, 1] as its last line, got '[true]'"),
        ("echo '[]'", "own.sh printed [], no solution"),
        ("echo '[0]'", f"own.sh chose 1 strategies; the problem has {len(contest_form(PROBLEM).problem.nodes)} nodes"),
    ],
)
def test_each_failure_is_one_message(script, pool: SolverPool, text: str, message: str) -> None:
    result = solve(PROBLEM, script(text), SolveOptions(time_limit=20), pool=pool)
    assert (result.status, result.choices, result.message) == (Status.NO_SOLUTION, None, message)


def test_one_that_does_not_end_is_ended_with_what_it_started(script, tmp_path: Path) -> None:
    name = script(f"sleep 300 & echo $! > {tmp_path}/child; wait")
    started = time.monotonic()
    result = solve(PROBLEM, name, SolveOptions(time_limit=1.0))
    assert time.monotonic() - started < 100
    assert result.message == "own.sh did not end within its time limit of 1 s"
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    os.kill(child, 9)
    pytest.fail("a process of the executable was left over")


def test_a_path_that_cannot_be_executed_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(UnknownSolverError, match=r"chmod \+x"):
        find_solver(f"exe:{tmp_path}/data")
    with pytest.raises(UnknownSolverError, match="there is no file or command"):
        find_solver("exe:absent-solver")
    assert not find_solver("exe:sh").is_built_in
