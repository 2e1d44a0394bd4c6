"""The command ``bench``: its file, its table, and that bad input is one clear line and code 2."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from support.processes.command_line import TINY_PROBLEM

from formulations.problem.solution import Progress, Status
from formulations.solvers.protocol.registry import SOLVERS
from planner.benchmarks import BenchResult, BenchRow, random_suite
from planner.papers.claims.claim import PAPERS
from planner.papers.claims.results import tables_of
from runtime.commands.tables.bench import LiveRows

FAKE = "support.problems.fake_solvers:"


@pytest.fixture
def bench(meshwright):
    return partial(meshwright, "bench")


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problems" / "tiny.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY_PROBLEM))
    (path.parent / "README").write_text("not a problem")
    return path


def test_help_names_tables_that_are_computed_only_where_named(bench) -> None:
    words = " ".join(bench("--help").out.replace("│", " ").split())
    named = [name for paper in PAPERS for name, table in tables_of(paper).items() if table.named_only]
    assert named
    for name in named:
        assert name in words


def test_help_names_suites_and_the_group_of_entry_points(bench) -> None:
    outcome = bench("--help")
    assert outcome.code == 0
    words = " ".join(outcome.out.replace("│", " ").split())
    for word in ("random", "contest", "--json", "--solvers", "--time-limit", "--best", "meshwright.solvers"):
        assert word in words


def test_contest_files_beside_the_best_known(bench, problem: Path, tmp_path: Path) -> None:
    best, rows = tmp_path / "best.json", tmp_path / "rows.json"
    best.write_text('{"tiny": 8, "another": 3}')
    outcome = bench("contest", problem.parent, "--solvers", "brute_force,greedy", "--best", best, "--json", rows)
    assert outcome.code == 0
    assert [line.split()[:2] for line in outcome.err.splitlines()] == [["tiny", "brute_force"], ["tiny", "greedy"]]
    assert "+25.000 %" in outcome.out
    found = json.loads(rows.read_text())
    assert [(row["solver"], row["objective"], row["best_known"]) for row in found] == [
        ("brute_force", 10, 8),
        ("greedy", 10, 8),
    ]


def test_tables_have_the_columns_of_a_paper_or_all(bench, problem: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    few = ["instance", "solver", "nodes", "status", "objective", "bound", "gap", "seconds"]
    asked = ("contest", problem, "--solvers", "brute_force", "--table", table)
    outcome = bench(*asked)
    assert outcome.code == 0
    heading, _, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.read_text().splitlines())
    assert heading == few
    assert row[:7] == ["tiny", "brute_force", "2", "optimal", "10", "10", "0.00 %"]
    assert "CPU seconds" not in outcome.out
    outcome = bench(*asked, "--all-columns")
    heading = [cell.strip() for cell in table.read_text().splitlines()[0].split("|")[1:-1]]
    assert set(few) < set(heading)
    assert {"proof", "CPU seconds", "peak RSS", "objective / best"} <= set(heading)
    assert "CPU seconds" in outcome.out


def test_the_table_is_not_cut_where_there_is_no_terminal(bench) -> None:
    outcome = bench("random", "--size", "small", "--solvers", "greedy", "--seed", "1")
    assert outcome.code == 0
    assert "…" not in outcome.out
    lines = [line for line in outcome.out.splitlines() if "-small-1" in line]
    assert len(lines) == 2 * len(random_suite(["small"]).instances)
    assert all("brute_force" in line or "greedy" in line for line in lines)


def test_an_interrupt_prints_what_is_there_and_leaves_with_130(
    bench, problem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOLVERS, "interrupting", FAKE + "interrupt_parent")
    rows = tmp_path / "rows.json"
    outcome = bench("contest", problem, "--solvers", "brute_force,interrupting,greedy", "--json", rows)
    brute, interrupting, told = outcome.err.splitlines()
    assert (outcome.code, told) == (130, "meshwright: interrupted after 2 rows")
    assert "brute_force" in brute  # a line for each row as it is finished, where there is no terminal
    assert "interrupting" in interrupting
    assert [row.solver for row in BenchResult.load(rows).rows] == ["brute_force", "interrupting"]
    assert "interrupting" in outcome.out


def test_a_contradiction_is_told_and_leaves_with_1(bench, problem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOLVERS, "liar", FAKE + "wrong_bound")
    document = json.loads(json.dumps(TINY_PROBLEM))
    del document["problem"]["usage_limit"]
    problem.write_text(json.dumps(document))
    outcome = bench("contest", problem, "--solvers", "liar,brute_force")
    assert outcome.code == 1
    assert outcome.err.splitlines()[2].startswith("meshwright: contradiction: tiny:")
    assert "brute_force" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["SUITE"]),
        (["planet"], ["planet", "random", "contest"]),
        (["contest"], ["at least one file"]),
        (["contest", "absent"], ["absent"]),
        (["contest", "empty"], ["empty", ".json"]),
        (["contest", "malformed.json"], ["malformed.json", "not valid JSON"]),
        (["contest", "malformed.json", "--size", "small"], ["--size", "random"]),
        (["random", "malformed.json"], ["PATH", "malformed.json"]),
        (["random", "--size", "huge"], ["--size", "huge", "middle"]),
        (["random", "--size", "small,"], ["--size", "small,"]),
        (["random", "--seed", "-1"], ["--seed"]),
        (["random", "--solvers", "oracle"], ["oracle", "portfolio"]),
        (["random", "--solvers", "greedy,greedy"], ["--solvers", "twice"]),
        (["random", "--solvers", "math:nothing"], ["math:nothing", "no attribute"]),
        (["random", "--time-limit", "0"], ["--time-limit"]),
        (["random", "--time-limit", "nan"], ["--time-limit"]),
        (["random", "--json", "absent/rows.json"], ["--json", "absent"]),
        (["random", "--best", "absent.json"], ["--best", "absent.json"]),
        (["random", "--best", "malformed.json"], ["malformed.json", "not valid JSON"]),
    ],
)
def test_bad_input_is_one_clear_line(
    bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "malformed.json").write_text("{")
    outcome = bench(*arguments)
    assert outcome.code == 2, outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("meshwright: ")
    for word in words:
        assert word in outcome.err


def test_the_screen_shows_the_newest_rows_and_the_solve_that_runs() -> None:
    suite = random_suite(["small"])
    display = LiveRows(suite, height=8)
    for instance in suite.instances[:4]:
        display.begins(instance.name, "greedy")
        display.row(row(instance.name))
    display.begins(suite.instances[4].name, "portfolio")
    display.progress(Progress(1.0, 2_000, 1_000, "lagrangian"))
    text = io.StringIO()
    Console(file=text, width=200, height=8).print(display)
    shown = text.getvalue()
    assert [name.name in shown for name in suite.instances[:6]] == [False, False, True, True, True, False]
    assert f"5/{len(suite.instances)}" in shown
    assert "incumbent 2,000  bound 1,000  gap 50.00 %" in shown


def row(instance: str) -> BenchRow:
    return BenchRow(
        instance, "random", "greedy", Status.FEASIBLE, 10, None, None, 2.0, 1.0, 5, 0.0, 6, 3.0, 0, None, "", "", ()
    )


def test_papers_prints_every_claim_and_resumes(bench, tmp_path: Path) -> None:
    out = tmp_path / "results"
    ran = bench("papers", "--paper", "h3t", "--part", "search_space", "--out", out)
    assert ran.code == 0
    assert "h3t: table 1 of 1, search_space" in ran.err
    assert "h3t: 84 claims" in ran.out
    assert "search_space/S_full" in ran.out
    page = (out / "CLAIMS.md").read_text()
    assert page.count("\n| h3t | ") == 84 + 5
    assert json.loads((out / "h3t.json").read_text())["tables"]["search_space"]["rows"][0]["S_full"] == 128
    again = bench("papers", "--paper", "h3t", "--part", "search_space", "--out", out)
    assert (again.code, "search_space is there already" in again.err) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["papers", "--paper", "alpa"], "--paper: 'alpa' is no paper; use kiwi, osdp, galvatron, h3t, capture"),
        (["papers", "--part", "table_1"], "--part: tables belong to one paper; name it with --paper"),
        (["papers", "--paper", "h3t", "--part", "nine"], "paper h3t has no table 'nine'; use search_space, table_1"),
        (["random", "--paper", "h3t"], "--paper: belongs to the suite papers; leave it out"),
        (["random", "--out", "x"], "--out: belongs to the suite papers; leave it out"),
    ],
)
def test_bad_input_of_papers_is_one_line(bench, arguments: list[str], message: str) -> None:
    outcome = bench(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1
