"""Every notebook is the pair of its script, holds what its cells showed, and runs through at a small size."""

from __future__ import annotations

import ast
import json
import re
import types
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import jupytext
import matplotlib
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib import pyplot
from matplotlib_inline.backend_inline import configure_inline_support
from support.tiers import only

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SCRIPTS = sorted(NOTEBOOKS.glob("*.py"))
QUICK = NOTEBOOKS / "02_solvers.ipynb"
INLINE = "module://matplotlib_inline.backend_inline"
MOST_BYTES = 1_000_000
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|work|Users|usr|opt|tmp|private|var)/\w")
TABLE_HEADING = re.compile(r'<table[^>]*class="dataframe[^>]*>\s*<thead>(.*?)</thead>', re.DOTALL)
HEADING_CELL = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
SMALL_GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 256,
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def outputs(notebook: nbformat.NotebookNode) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def kinds(notebook: nbformat.NotebookNode) -> dict[int, set[str]]:
    """Of every cell that showed something, as a table, a figure or text."""
    found: dict[int, set[str]] = {}
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            kind = next((kind for kind in ("image/png", "text/html", "text/plain") if kind in data), None)
            if kind is not None:
                found.setdefault(number, set()).add(kind)
    return found


def columns(notebook: nbformat.NotebookNode) -> dict[int, list[list[str]]]:
    """Names in the heading of every table of pandas, by its cell; none of these tables has data for columns."""
    found: dict[int, list[list[str]]] = {}
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            for table in TABLE_HEADING.findall(output.get("data", {}).get("text/html", "")):
                names = [unescape(name.strip()) for name in HEADING_CELL.findall(table)]
                found.setdefault(number, []).append(names)
    return found


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    """Runs cells in this process, which has loaded the planner and its solvers already."""
    former = matplotlib.get_backend()
    matplotlib.use(INLINE)
    made = InteractiveShell.instance(user_module=types.ModuleType("notebook"))
    configure_inline_support(made, INLINE)
    with pyplot.ion():
        yield made
    InteractiveShell.clear_instance()
    matplotlib.use(former)


def run_cell(shell: InteractiveShell, source: str) -> list[Any]:
    """Run a cell and return what it shows."""
    with shell.display_trap, capture_output() as captured:
        shell.run_cell(source).raise_error()
    return [nbformat.v4.new_output("display_data", data=shown.data) for shown in captured.outputs]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_and_notebook_are_one_and_its_outputs_are_kept(script: Path) -> None:
    path = script.with_suffix(".ipynb")
    notebook = nbformat.read(path, as_version=4)
    paired = jupytext.read(script)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in paired.cells]
    assert path.stat().st_size < MOST_BYTES
    ran = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert ran == list(range(1, len(ran) + 1)), "run `make notebooks`: a cell was changed after it ran"
    shown = outputs(notebook)
    assert {output.output_type for output in shown} <= {"display_data", "execute_result", "stream"}
    assert not [output.text for output in shown if output.output_type == "stream" and output.name == "stderr"]
    assert ABSOLUTE_PATH.search(json.dumps(shown)) is None
    assert {"image/png", "text/html"} <= set().union(*kinds(notebook).values())


PAPERS = [script for script in SCRIPTS if "03" <= script.name[:2] <= "09"]
READING = {
    "planner.plots",
    "planner.papers.claims.results",
    "planner.papers.kiwi.headline",
    "planner.papers.printed",
}
"""Modules of ours that read results and draw."""


@pytest.mark.parametrize("script", PAPERS, ids=lambda path: path.stem)
def test_notebooks_of_the_papers_show_results_files(script: Path) -> None:
    """Of other modules they import constants and what the papers print alone: they plan and solve nothing."""
    imports = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if str(node.module).partition(".")[0] in ("formulations", "planner", "runtime")]
    assert "planner.papers.claims.results" in {node.module for node in ours}
    others = [alias.name for node in ours if node.module not in READING for alias in node.names]
    assert [name for name in others if not (name.isupper() or name == "paper_tables")] == []


SECONDS = {"01_first_plan": "5", "10_explore_a_plan": "3"}
"""Time of each search in notebooks whose limits leave few plans, so that a busy machine finds one too."""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    "path", only([QUICK], [script.with_suffix(".ipynb") for script in SCRIPTS]), ids=lambda p: p.stem
)
def test_a_notebook_runs_at_a_small_size(
    path: Path, shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows the same kinds of figures, and tables of the same columns, but for cells that then show nothing."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL_GPT2))
    monkeypatch.setenv("MESHWRIGHT_NOTEBOOK_MODEL", f"hf:{config}")
    monkeypatch.setenv("MESHWRIGHT_NOTEBOOK_CLUSTER", "v100-8-nvlink")
    monkeypatch.setenv("MESHWRIGHT_NOTEBOOK_SECONDS", SECONDS.get(path.stem, "1"))
    monkeypatch.chdir(path.parent)
    notebook = nbformat.read(path, as_version=4)
    kept, kept_columns = kinds(notebook), columns(notebook)
    assert kept_columns or "dataframe" not in json.dumps(outputs(notebook)), "no heading was found"
    shell.reset()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = run_cell(shell, cell.source)
    shown = kinds(notebook)
    assert {"image/png", "text/html"} <= set().union(*shown.values())
    assert {number: kept.get(number) for number in shown} == shown
    assert {number: kept_columns.get(number) for number in columns(notebook)} == columns(notebook)
