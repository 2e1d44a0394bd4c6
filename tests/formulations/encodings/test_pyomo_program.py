"""A Pyomo model as exact integer rows and as a file: nothing is rounded, and both have the same optimum."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formulations.encodings.pyomo_program import PyomoProgram, add_rows, write_program
from formulations.problem.strategy_problem import ProblemError

ROOT = Path(__file__).parents[3]
LARGE = 10**17 + 1
"""No double is equal to it."""


def small_model(limit: int) -> Any:
    from pyomo.core import Binary, ConcreteModel, Integers, Objective, Var

    def capacity(m: Any) -> Any:
        """Equation (1)."""
        return LARGE * m.x[0] + m.x[1] + m.x[0] + 5 <= limit + 5

    def one(m: Any, bound: int) -> Any:
        return m.x[0] + m.x[1] == bound

    def split(m: Any) -> Any:
        return m.share >= m.x[0]

    model = ConcreteModel()
    model.x = Var([0, 1], domain=Binary)
    model.count = Var(domain=Integers, bounds=(0, LARGE))
    model.share = Var(bounds=(0, 1))
    model.total_cost = Objective(expr=LARGE * model.x[0] + 4 * model.x[1])
    add_rows(model, capacity)
    add_rows(model, one, [1])
    add_rows(model, split)
    return model


def test_rows_are_exact() -> None:
    program = PyomoProgram(small_model(LARGE)).integer_program()
    assert (program.columns, program.rows) == (4, 3)
    assert program.cost.tolist() == [LARGE, 4, 0, 0]
    assert program.upper.tolist() == [1, 1, LARGE, 1]
    assert program.is_integer.tolist() == [True, True, True, False]
    assert [part.tolist() for part in program.row(0)] == [[0, 1], [LARGE + 1, 1]]
    assert program.row_upper == (LARGE, 1, 0)
    assert program.row_lower == (None, 1, None)


@pytest.mark.parametrize(
    ("limit", "values", "broken"),
    [
        (LARGE + 1, [1.0, 0.0, 1.0, 0.0], []),
        (LARGE, [1.0, 0.0, 1.0, 1.0], [0]),
        (LARGE, [0.0, 1.0 - 1e-9, 0.0, 0.0], []),
        (LARGE, [1.0, 1.0, 1.0, 0.0], [0, 1]),
    ],
)
def test_rows_are_judged_in_exact_integers(limit: int, values: list[float], broken: list[int]) -> None:
    assert PyomoProgram(small_model(limit)).integer_program().broken_rows(np.array(values)) == broken


def test_what_is_added_later_comes_last() -> None:
    from pyomo.core import Binary, Constraint, Var

    model = small_model(LARGE)
    adapter = PyomoProgram(model)
    before = adapter.integer_program()
    model.more = Var(domain=Binary)
    model.tie = Constraint(expr=model.more + model.share <= 1)
    after = adapter.integer_program()
    assert (after.columns, after.rows) == (before.columns + 1, before.rows + 1)
    assert after.row_value[: len(before.row_value)].tolist() == before.row_value.tolist()
    assert sorted(after.row(3)[0].tolist()) == [3, 4]
    adapter.load(np.array([1.0, 0.0, 7.0, 0.25]))
    assert (model.x[0].value, model.count.value, model.share.value, model.more.value) == (1.0, 7.0, 0.25, None)


def test_only_integers_are_taken() -> None:
    from pyomo.core import Constraint

    for expression in (lambda m: 0.5 * m.x[0] <= 1, lambda m: m.x[0] <= 1.5, lambda m: m.x[0] * m.x[1] <= 1):
        model = small_model(LARGE)
        model.wrong = Constraint(rule=expression)
        with pytest.raises(TypeError):
            PyomoProgram(model).integer_program()
    model = small_model(LARGE)
    model.wrong = Constraint(expr=2**63 * model.x[0] <= 1)
    with pytest.raises(OverflowError):
        PyomoProgram(model).integer_program()


def test_rows_have_the_names_and_words_of_their_rules(tmp_path: Path) -> None:
    model = small_model(LARGE)
    assert model.capacity.doc == "Equation (1)."
    write_program(model, tmp_path / "small.lp")
    assert f"+{LARGE + 1} x(0)" in (tmp_path / "small.lp").read_text()
    write_program(model, tmp_path / "small.mps")
    assert "capacity" in (tmp_path / "small.mps").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.lp", "small.mps"]
    with pytest.raises(ProblemError, match=r"small\.txt: use a path that ends in \.lp or \.mps"):
        write_program(model, tmp_path / "small.txt")


@pytest.mark.parametrize(
    "seeds", [12, pytest.param(200, marks=pytest.mark.fuzz)], ids=lambda seeds: f"{seeds}-instances"
)
@pytest.mark.parametrize("name", ["kiwi_full", "kiwi_full_published", "kiwi_reduced", "kiwi_reduced_published", "h3t"])
def test_file_and_rows_have_the_same_optimum(name: str, seeds: int) -> None:
    """In a process of its own, as it loads HiGHS."""
    finished = subprocess.run(
        [sys.executable, "-m", "support.problems.paper_programs", name, str(seeds)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr
    optima = json.loads(finished.stdout)
    assert len(optima) > seeds // 2
    assert any(rows is not None for rows, _ in optima)
    assert all(rows == file for rows, file in optima), optima
