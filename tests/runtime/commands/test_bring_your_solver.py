"""The page about own solvers: its example, as it stands there, is a function, an entry point and an executable."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.processes.command_line import TINY_PROBLEM

import planner.benchmarks

PAGE = (Path(planner.benchmarks.__file__).parent / "BRING_YOUR_SOLVER.md").read_text()


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_solver.py").write_text(block("python"))
    (tmp_path / "own_solver.py").chmod(0o755)
    metadata = tmp_path / "own-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    group, points = re.findall(r'\[project\.entry-points\."(.+)"\]\n(.*)', block("toml"), re.DOTALL)[0]
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{points.replace(chr(34), '')}")
    (tmp_path / "problems").mkdir()
    (tmp_path / "problems" / "tiny.json").write_text(json.dumps(TINY_PROBLEM))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path or os.getcwd() for path in sys.path))
    return tmp_path


def test_the_example_runs_as_it_stands_there(meshwright, folder: Path) -> None:
    benchmark, single = block("sh").strip().splitlines()
    outcome = meshwright(*shlex.split(benchmark)[1:], "--json", "rows.json", "--time-limit", "100")
    assert len(outcome.err.splitlines()) == 3  # a line for each row
    assert outcome.code == 0
    rows = json.loads((folder / "rows.json").read_text())
    assert [row["solver"] for row in rows] == ["own_solver:solve", "descent", "exe:./own_solver.py"]
    assert {(row["objective"], row["status"], row["bound"]) for row in rows} == {(10, "feasible", None)}
    table = (folder / "table.tex").read_text()
    assert table.startswith("\\begin{tabular}{llrlrrrr}\n\\toprule\ninstance & solver &")
    assert table.count("own\\_solver") == 2
    outcome = meshwright(*shlex.split(single)[1:])
    assert outcome.code == 0
    assert json.loads((folder / "solution.json").read_text())["choices"] == [1, 1]


def test_the_example_is_thirty_lines() -> None:
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 30
