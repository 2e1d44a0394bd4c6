"""Constants replaced by the environment: what they reach, and that what does not fit is refused."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from formulations.tuning.overrides import VARIABLE, OverrideError, as_variable, install, replaced

ROOT = Path(__file__).resolve().parents[3]
SOURCE = """
A, B = 1, 2.0
C = 10 * A
NAMES = {"one": 1, "two": 2}
def f(x=C):
    return x
"""


def values(names: dict[str, Any]) -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec(compile(replaced(SOURCE, "module", names), "module", "exec"), space)
    return space


def in_a_new_process(overrides: dict[str, dict[str, Any]], code: str) -> str:
    environment = dict(os.environ) | as_variable(overrides)
    command = [sys.executable, "-c", code]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_a_value_reaches_constants_and_defaults_made_of_it() -> None:
    space = values({"A": 7})
    assert (space["A"], space["B"], space["C"], space["f"]()) == (7, 2.0, 70, 70)


def test_tuples_and_members() -> None:
    space = values({"B": [1, 2], "NAMES": {"without": "one"}})
    assert (space["B"], space["NAMES"]) == ((1, 2), {"two": 2})


def test_lines_stay_where_they_are() -> None:
    before, after = ast.parse(SOURCE), replaced(SOURCE, "module", {"A": 7})
    assert [node.lineno for node in before.body] == [node.lineno for node in after.body]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"D": 1}, "module has no constant D; it has A, B, C, NAMES"),
        ({"NAMES": {"without": "three"}}, "module.NAMES has no member 'three'; it has one, two"),
    ],
)
def test_what_does_not_fit_is_named(names: dict[str, Any], words: str) -> None:
    with pytest.raises(OverrideError, match=words):
        replaced(SOURCE, "module", names)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must map modules"),
        (json.dumps({"formulations.tuning.overrides": {"WITHOUT": 1}}), "is imported already"),
    ],
)
def test_a_variable_that_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(OverrideError, match=words):
        install(text)


def test_nothing_to_replace_sets_no_variable() -> None:
    assert as_variable({}) == {}
    assert list(as_variable({"a": {"b": 1}})) == [VARIABLE]


def test_a_tunable_changes_what_a_worker_does() -> None:
    code = """
from formulations.instances.random_families import family_problem
from formulations.solvers import SolverInputError, solve
try:
    print(solve(family_problem("cliques", "small"), "brute_force").status)
except SolverInputError as error:
    print(error)
"""
    printed = in_a_new_process({"formulations.solvers.exact.brute_force": {"MAX_ASSIGNMENTS": 3}}, code)
    assert "at most 3" in printed.replace(" only", ""), printed


def test_techniques_are_left_out_of_presolve_and_lanes() -> None:
    code = """
from formulations.instances.random_families import family_problem
from formulations.presolve import REDUCTIONS
from formulations.problem.solution import SolveOptions
from formulations.solvers.running.lanes import lanes_for
problem = family_problem("trees", "small")
lanes = lanes_for(problem, SolveOptions(workers=2))
print({turn.solver for lane in lanes for turn in lane} & {"highs", "lagrangian"})
print({"free_nodes"} & {*REDUCTIONS})
"""
    left_out = {
        "formulations.solvers.running.lanes": {"MEMBERS": {"without": "highs"}},
        "formulations.presolve.sequence": {"REDUCTIONS": {"without": "free_nodes"}},
    }
    assert in_a_new_process({}, code).splitlines()[1] == "{'free_nodes'}"
    assert in_a_new_process(left_out, code).splitlines() == ["{'lagrangian'}", "set()"]
