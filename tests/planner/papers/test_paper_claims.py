"""The table of claims: none absent, verdicts, results files that resume, and relations between rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from planner.papers.cells import Cell, Table
from planner.papers.claims import results as results_module
from planner.papers.claims.claim import PAPERS, Claim, Verdict, claim_rows, printed_claims
from planner.papers.claims.judge import judge_cells, judge_number, not_reproduced, number, same
from planner.papers.claims.report import HEADINGS, hardware_lines, headlines, markdown, summary
from planner.papers.claims.results import PaperResults, ResultsError, load_results, paper_claims, run_paper, tables_of
from runtime.prediction.local_tables.registry import local_tables

PRINTED = Path(results_module.__file__).parent / "printed"
CLAIMS = {"kiwi": 46, "osdp": 47, "galvatron": 194, "h3t": 84, "capture": 65}


class Heard:
    """An observer that notes what happens."""

    def __init__(self) -> None:
        self.tables: list[str] = []
        self.there: list[str] = []

    def table(self, paper: str, table: str, number: int, count: int) -> None:
        self.tables.append(f"{paper} {table} {number}/{count}")

    def kept(self, paper: str, table: str) -> None:
        self.there.append(table)

    def step(self, text: str) -> None:
        assert text


def leaves(value: object) -> int:
    return sum(map(leaves, value.values())) if isinstance(value, dict) else 1


@pytest.mark.parametrize("paper", PAPERS)
def test_no_claim_is_absent(paper: str) -> None:
    rows = paper_claims(PaperResults(paper))
    document = json.loads((PRINTED / f"{paper}.json").read_text())
    keys = [row.claim.key for row in rows]
    assert len(keys) == len(set(keys)) == leaves(document) == CLAIMS[paper]
    assert keys == [claim.key for claim in printed_claims(paper)]
    for row in rows:
        assert row.answer.reason, row.claim.key
        assert row.answer.verdict is not Verdict.NOT_REPRODUCED or row.answer.ours in ("", "none")
    assert headlines(rows)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_that_a_rule_needs_exists(paper: str) -> None:
    rules = __import__(f"planner.papers.claims.{paper}", fromlist=["RULES"]).RULES
    needed = {table for rule in rules for table in rule.needs}
    assert needed <= {*tables_of(paper), *local_tables(paper)}


def test_a_claim_without_a_rule_is_an_error_and_the_first_rule_answers() -> None:
    with pytest.raises(LookupError, match="osdp: no rule answers the claim table_1/N&D/layers"):
        claim_rows("osdp", [], {})
    rules = [
        same("iterations_averaged", lambda: 7, "ours"),
        number("default*", lambda results, claim: 4.2, "close", "a"),
        not_reproduced("*", "because"),
    ]
    rows = {row.claim.key: row.answer for row in claim_rows("osdp", rules, {})}
    assert (rows["iterations_averaged"].verdict, rows["iterations_averaged"].ours) == (Verdict.DIFFERS, "7")
    assert rows["headline_origin"].reason == "because"
    assert "not run yet: tables a of `meshwright bench papers --paper osdp`" in rows["default_slice_granularity"].reason
    run = {row.claim.key: row.answer for row in claim_rows("osdp", rules, {"a": []})}
    assert run["default_slice_granularity"].verdict is Verdict.HOLDS
    with pytest.raises(ValueError, match="paper 'alpa' is not known; use kiwi, osdp"):
        printed_claims("alpa")


def test_numbers_hold_within_a_tenth() -> None:
    assert judge_number(1.09, 1.0, "why").verdict is Verdict.HOLDS
    assert judge_number(1.2, 1.0, "why").reason == "why"
    assert judge_number([1.0, 2.3], [1.0, 2.0], "why").verdict is Verdict.DIFFERS
    assert judge_number([1.0], [1.0, 2.0], "why").verdict is Verdict.DIFFERS
    assert judge_number(None, 1.0, "why").verdict is Verdict.NOT_REPRODUCED


def test_a_row_holds_where_memory_and_every_cell_do() -> None:
    assert judge_cells([None, 10.5], ["OOM", 10.0], "why").verdict is Verdict.HOLDS
    answer = judge_cells([None, 10.5, 3.0], ["OOM", 10.0, "OOM"], "why")
    assert (answer.verdict, answer.ours) == (Verdict.DIFFERS, "OOM, 10.5, 3")
    assert answer.reason == "memory as printed in 2 of 3 cells; ours 1.05 to 1.05 times the paper's, median 1.05; why"
    assert judge_cells([None], ["OOM"], "why").reason == "memory as printed in 1 of 1 cells"
    assert judge_cells([1.0], [None], "why").verdict is Verdict.NOT_REPRODUCED


def test_a_run_resumes_at_the_first_table_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def rows(name: str) -> list[dict[str, float]]:
        calls.append(name)
        if calls.count("second") == 1 and name == "second":
            raise KeyboardInterrupt
        return [{"value": 1.5}] if name == "first" else []

    tables = {name: Table(lambda name=name: [Cell("a cell", partial(rows, name))]) for name in ("first", "second")}
    tables["long"] = Table(lambda: [Cell("a cell", partial(rows, "long"))], named_only=True)
    monkeypatch.setattr(results_module, "tables_of", lambda paper: tables)
    heard = Heard()
    with pytest.raises(KeyboardInterrupt):
        run_paper("osdp", tmp_path, heard)
    assert load_results(tmp_path / "osdp.json", "osdp").rows == {"first": [{"value": 1.5}]}
    found = run_paper("osdp", tmp_path, heard)
    assert calls == ["first", "second", "second"]
    assert (heard.there, heard.tables[-1]) == (["first"], "osdp second 2/2")
    assert found.rows == {"first": [{"value": 1.5}], "second": []}
    assert found.tables["first"]["date"]
    assert [cell[:2] for cell in found.tables["first"]["cells"]] == [["a cell", 1]]
    with pytest.raises(ResultsError, match="paper osdp has no table 'third'; use first, second, long"):
        run_paper("osdp", tmp_path, heard, ["third"])


def test_a_run_goes_on_within_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def rows(name: str) -> list[dict[str, str]]:
        calls.append(name)
        if calls == ["a", "b"]:
            raise KeyboardInterrupt
        return [{"cell": name}]

    monkeypatch.setattr(results_module, "tables_of", lambda paper: {})
    named = {"long": Table(lambda: [Cell(name, partial(rows, name)) for name in ("a", "b", "c")])}
    assert run_paper("osdp", tmp_path, Heard(), named=named).rows == {}
    assert calls == []
    with pytest.raises(KeyboardInterrupt):
        run_paper("osdp", tmp_path, Heard(), ["long"], named)
    begun = load_results(tmp_path / "osdp.json", "osdp")
    assert (begun.rows, begun.begun["long"]["rows"]) == ({}, [{"cell": "a"}])
    found = run_paper("osdp", tmp_path, Heard(), ["long"], named)
    assert calls == ["a", "b", "b", "c"]
    assert found.rows == {"long": [{"cell": name} for name in "abc"]}
    assert load_results(tmp_path / "osdp.json", "osdp") == found
    assert found.begun == {}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 2, "paper": "h3t", "tables": {}}', '{"format": 2, "paper": "osdp"}']
)
def test_a_file_that_is_no_results_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "osdp.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=r"osdp.json .*; delete it, or use another folder"):
        load_results(path, "osdp")
    assert path.read_text() == text


def test_the_page_has_every_claim(tmp_path: Path) -> None:
    rows = [row for paper in PAPERS for row in paper_claims(PaperResults(paper))]
    page = markdown(rows, [PaperResults(paper) for paper in PAPERS])
    assert page.count(f"| {' | '.join(HEADINGS)} |") == 2
    for row in rows:
        assert f"| {row.claim.paper} | {row.claim.key} | " in page
    assert [line.split(":")[0] for line in summary(rows)] == list(PAPERS)
    assert isinstance(rows[0].claim, Claim)


def test_the_page_shows_both_hardwares_where_tables_have_them() -> None:
    row = {"column": "a column", "solver": "all_on", "hardware": "preset", "seconds": 4.46}
    none = {**row, "hardware": "inferred", "seconds": None}
    free = {**row, "solver": "exact_free", "seconds": 3.21}
    both = {"table_1": {"rows": [row]}, "table_1_inferred": {"rows": [none]}, "exact_free": {"rows": [free]}}
    lines = hardware_lines([PaperResults("h3t", both)])
    assert "| all_on | preset | 4.5 |" in lines
    assert "| all_on | inferred | out of memory |" in lines
    assert "| exact, free | preset | 3.2 |" in lines
    assert hardware_lines([PaperResults("h3t")]) == []
