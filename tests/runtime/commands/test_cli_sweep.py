"""The command ``sweep``: a table, rows that are not planned twice, and bad input."""

from __future__ import annotations

import json
import re
from concurrent.futures import ProcessPoolExecutor

import pytest
from support.steps.planned_steps import configuration_file

from planner import api
from planner.explore.errors import ExploreError
from planner.explore.sweeping import Sweep
from planner.session import PlanRequest

SMALL = ["--cluster", "a100-8-nvlink", "--layers", "1", "--batch", "2", "--seq", "16", "--dropout", "0"]


def test_a_sweep_is_written_and_goes_on(meshwright, tmp_path) -> None:
    out, folder = tmp_path / "sweep.json", tmp_path / "rows"
    asked = [
        "sweep",
        f"hf:{configuration_file('gpt2')}",
        *SMALL,
        *("--mesh", "1", "--mesh", "2"),
        *("--memory", "4GiB", "--memory", "1GiB"),
        *("--model-formulation", "sharding", "--solver", "lagrangian", "--time-limit", "2"),
        *("--out", str(out), "--folder", str(folder)),
    ]
    outcome = meshwright(*asked)
    assert outcome.code == 0, outcome
    rows = json.loads(out.read_text())["rows"]
    assert [(row["mesh"], row["memory_bytes"]) for row in rows] == [
        ("1", 4 * 2**30),
        ("1", 2**30),
        ("2", 4 * 2**30),
        ("2", 2**30),
    ]
    assert [row["status"] == "no_plan" for row in rows] == [False, True, False, True]
    assert "the cluster reserves" in outcome.out
    assert "4 cells, 2 with a plan, 0 known before" in outcome.out
    again = meshwright(*asked)
    assert "4 cells, 2 with a plan, 4 known before" in again.out
    assert json.loads(out.read_text())["rows"] == rows


def test_options_of_a_plan_reach_every_plan(meshwright, tmp_path, monkeypatch) -> None:
    asked = {}

    def sweep(reference, *, request, memories, **_) -> Sweep:
        asked[reference.source] = request, memories
        return Sweep(reference.source, ())

    monkeypatch.setattr("planner.api.sweep", sweep)
    options = [
        "--host-memory",
        "1GiB",
        "--gap",
        "0.1",
        "--overlap",
        "--workers",
        "1",
        "--out",
        str(tmp_path / "s.json"),
    ]
    options += ["--tensor-memory", "1GiB", "--tensor-memory", "3GiB"]
    outcome = meshwright("sweep", "hf:gpt2", *SMALL, "--mesh", "2", *options)
    assert outcome.code == 0, outcome.err
    assert asked == {
        "hf:gpt2": (
            PlanRequest(time_limit=10.0, workers=1, host_memory=2**30, gap=0.1, overlap=True),
            [3 * 2**30, 5 * 2**30],  # the preset reserves 2 GiB
        ),
    }
    text = " ".join(meshwright("sweep", "--help").out.replace("│", " ").split())
    assert "As for plan" not in text
    assert "kiwi_offload" in text


def test_bad_values_are_named(meshwright, tmp_path) -> None:
    def refused(*values: str) -> str:
        outcome = meshwright("sweep", "hf:gpt2", *SMALL, *values, "--out", str(tmp_path / "sweep.json"))
        assert outcome.code == 2
        assert outcome.err.count("\n") == 1
        return outcome.err

    assert "--mesh: '0' is no mesh" in refused("--mesh", "2", "--mesh", "0")
    assert "--memory: 'much' is no size" in refused("--mesh", "2", "--memory", "much")
    both = refused("--mesh", "2", "--memory", "4GiB", "--tensor-memory", "2GiB")
    assert "--tensor-memory: 2GiB beside --memory 4GiB; give one of them" in both
    layers = ["--mesh", "2", "--model-formulation", "osdp"]
    for option in (
        ["--solver", "highs"],
        ["--gap", "0.1"],
        ["--workers", "1"],
        ["--host-memory", "1GiB"],
        ["--overlap"],
    ):
        name = option[0].removeprefix("--").replace("-", "_")
        assert f"{name}: osdp plan layers by searches of their own; leave it out" in refused(*layers, *option)
    assert "formulation 'alpa' is not known" in refused("--mesh", "2", "--model-formulation", "alpa")


def test_what_some_formulations_do_not_use_is_a_note(meshwright, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("planner.api.run_sweep", lambda name, *_: Sweep(name, ()))
    both = ["--mesh", "2", "--model-formulation", "sharding", "--model-formulation", "osdp", "--gap", "0.1"]
    outcome = meshwright("sweep", "hf:gpt2", *SMALL, *both, "--solver", "highs", "--json", "-")
    assert outcome.code == 0, outcome.err
    notes = json.loads(outcome.out)["notes"]
    assert notes == ["solver: not used by the plans of layers (osdp)", "gap: not used by the plans of layers (osdp)"]
    assert notes[1] in outcome.err


def test_progress_inside_a_row_is_on_standard_error(meshwright, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("runtime.commands.tables.progress.SILENT_SECONDS", 0.0)
    monkeypatch.setattr("runtime.commands.tables.progress.FIRST_LINE_SECONDS", 0.01)
    monkeypatch.setattr("runtime.commands.tables.progress.MOST_SECONDS_BETWEEN_LINES", 0.02)
    asked = ["--mesh", "1", "--model-formulation", "sharding", "--solver", "lagrangian", "--time-limit", "5"]
    outcome = meshwright(
        "sweep",
        f"hf:{configuration_file('gpt2')}",
        *SMALL,
        *asked,
        *("--folder", str(tmp_path / "rows"), "--json", "-"),
    )
    assert outcome.code == 0, outcome.err
    assert len(json.loads(outcome.out)["rows"]) == 1
    cell = "batch 2, mesh 1, all memory, sharding, lagrangian"
    assert re.search(rf"\d s  {cell}\n", outcome.err), "the line before a solver reports"
    assert re.search(rf"\d s  {cell}  \S+  (incumbent|bound) .*\n", outcome.err), "and what it reports"


def test_progress_inside_a_row_needs_threads() -> None:
    with ProcessPoolExecutor(1) as executor, pytest.raises(ExploreError, match="on_cell: it needs an executor of thr"):
        api.sweep("hf:gpt2", cluster="a100-8-nvlink", meshes=[(2,)], executor=executor, on_cell=lambda _: print)
