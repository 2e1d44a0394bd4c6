"""Every notebook runs from top to bottom, in `make test` the first, and is the pair of its script without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from support.tiers import first

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
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


@pytest.mark.parametrize("script", sorted(NOTEBOOKS.glob("*.py")), ids=lambda path: path.stem)
def test_script_and_notebook_are_one(script: Path) -> None:
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    paired = jupytext.read(script)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in paired.cells]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in notebook.cells if "outputs" in cell)


@pytest.mark.parametrize("path", first(1, sorted(NOTEBOOKS.glob("*.ipynb"))), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL_GPT2))
    monkeypatch.setenv("MESHWRIGHT_NOTEBOOK_MODEL", f"hf:{config}")
    monkeypatch.setenv("MESHWRIGHT_NOTEBOOK_CLUSTER", "v100-8-nvlink")
    monkeypatch.setenv("MESHWRIGHT_NOTEBOOK_SECONDS", "3" if path.stem == "01_first_plan" else "1")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    client.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert any("image/png" in output["data"] for output in shown)
    assert any("text/html" in output["data"] for output in shown)
