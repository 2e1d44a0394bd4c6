"""The command ``bench ablate``: its list, its table, and bad input in one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from planner.benchmarks import ablation
from planner.benchmarks.ablation import AblationResult, AblationRun, Variant
from planner.benchmarks.ablation.results import Outcome, Pair


@pytest.fixture
def command(meshwright):
    return partial(meshwright, "bench", "ablate")


def test_the_list_names_techniques_and_tunables(command) -> None:
    outcome = command("--list")
    assert (outcome.code, outcome.err) == (0, "")
    for word in ("techniques in", "tunables", "REDUCTIONS", "free_nodes", "MEMBERS", "MOST_COLUMNS"):
        assert word in outcome.out


def test_the_list_has_the_verdicts_of_an_ablation(command, tmp_path: Path) -> None:
    good, slow = Outcome("optimal", 10, 10, 0.0, 1.0), Outcome("optimal", 10, 10, 0.0, 3.0)
    path = tmp_path / "ablation.json"
    pair = Pair("code", "presolve.sequence:REDUCTIONS-free_nodes", "moon", 0, None, 0, good, slow)
    AblationResult((pair,), "code").save(path)
    former, listed = path.read_text(), tmp_path / "list.json"
    outcome = command("--list", "--verdicts", str(path), "--json", str(listed))
    assert (outcome.code, outcome.err) == (0, "")
    assert path.read_text() == former
    (named,) = (entry for entry in json.loads(listed.read_text()) if entry["verdicts"])
    assert (named["name"], named["verdicts"]) == ("REDUCTIONS", ["-free_nodes: loses 3.00 times the time on moon"])
    verdicts = [line.split("│")[-1].strip() for line in outcome.out.splitlines() if line.count("│") == 5]
    assert " ".join(filter(None, verdicts)) == "-free_nodes: loses 3.00 times the time on moon"


def test_the_table_has_a_verdict_for_each_variant(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(variants: list[Variant], run: AblationRun) -> AblationResult:
        found = Outcome("optimal", 10, 10, 0.0, 1.0)
        pairs = tuple(Pair("code", variant.name, "a", 0, None, 0, found, found) for variant in variants)
        return AblationResult(pairs, "code")

    monkeypatch.setattr(ablation, "ablate", fake)
    outcome = command("--only", "highs,free_nodes")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("loses nothing") == 3
    assert "MEMBERS-highs" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "osdp"], ["--suite", "osdp", "random"]),
        (["--suite", "contest"], ["PATH", "contest"]),
        (["--only", "magic"], ["--only", "magic", "--list"]),
        (["--size", "giant"], ["--size", "giant"]),
        (["--instances", "moon"], ["--instances", "moon"]),
        (["absent"], ["absent"]),
        (["--json", "absent/rows.json"], ["--json", "absent"]),
        (["--list", "--json", "absent/list.json"], ["absent", "--json"]),
        (["--list", "--verdicts", "absent.json"], ["absent.json", "--verdicts"]),
        (["--verdicts", "absent.json"], ["absent.json", "--verdicts", "--list"]),
    ],
)
def test_bad_input_is_one_clear_line(
    command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = command(*arguments)
    assert outcome.code == 2, outcome.err
    assert outcome.err.count("\n") == 1
    for word in words:
        assert word in outcome.err
