"""The command ``sweep``: a table, rows that are not planned twice, and bad input."""

from __future__ import annotations

import json

from support.steps.planned_steps import configuration_file

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

    def sweep(reference, *, request, **_) -> Sweep:
        asked[reference.source] = request
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
    outcome = meshwright("sweep", "hf:gpt2", *SMALL, "--mesh", "2", *options)
    assert outcome.code == 0, outcome.err
    assert asked == {
        "hf:gpt2": PlanRequest(time_limit=10.0, workers=1, host_memory=2**30, gap=0.1, overlap=True),
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
    assert "formulation 'alpa' is not known" in refused("--mesh", "2", "--model-formulation", "alpa")
