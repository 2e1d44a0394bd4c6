"""The results that pages and notebooks show: all cells are there, and have the same rows when computed again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from planner.papers.claims.claim import PAPERS
from planner.papers.claims.report import markdown, results_page
from planner.papers.claims.results import KEPT_RESULTS, kept_results, paper_claims, tables_of
from runtime.prediction.local_tables.registry import local_tables

LOCAL = {paper: local_tables(paper) for paper in PAPERS}
"""Tables of runs on one machine, which may be kept."""

QUICK_SECONDS = 1.0
CHEAP = {("galvatron", "strategies"), ("galvatron", "figure_4"), ("osdp", "table_1"), ("osdp", "figure_7")} | {
    ("h3t", "search_space"),
    ("h3t", "switches"),
    ("osdp", "profile"),
    ("h3t", "gpt_3"),
    ("capture", "figure_9"),
    ("capture", "degrees"),
    ("osdp", "modes"),
}
"""Tables of which cells are computed again in the fast tests too."""

PREPARED_LONG = {("kiwi", "figure_5_encoder"), ("kiwi", "figure_5_decoder")}
"""Tables whose cases take 45 s to prepare: computed again by ``make fuzz``; ``figure_6`` has the same code."""

TABLES = [(paper, name) for paper in PAPERS for name in tables_of(paper)]


def _tier(table: tuple[str, str]) -> Sequence[pytest.MarkDecorator]:
    if table in CHEAP:
        return ()
    return (pytest.mark.fuzz if table in PREPARED_LONG else pytest.mark.slow,)


@pytest.mark.parametrize("paper", PAPERS)
def test_all_cells_are_kept(paper: str) -> None:
    results, made = kept_results(paper), tables_of(paper)
    kept, known = results.tables, {**made, **LOCAL[paper]}
    assert made.keys() <= kept.keys() <= known.keys()
    assert not results.begun
    for name, table in kept.items():
        labels = [cell.label for cell in known[name].cells()]
        assert len(labels) == len(set(labels)), name
        assert [label for label, *_ in table["cells"]] == labels, name
        assert sum(count for _, count, _ in table["cells"]) == len(table["rows"]), name
        assert table["date"]
        assert table["machine"]


@pytest.mark.parametrize(
    ("paper", "name"),
    [pytest.param(*each, marks=_tier(each), id="-".join(each)) for each in TABLES],
)
def test_cells_have_the_same_rows_again(paper: str, name: str) -> None:
    """Three cells of each table, or one where all take long."""
    table, kept = tables_of(paper)[name], kept_results(paper).tables[name]
    cells = list(table.cells())
    order = sorted(range(len(cells)), key=lambda number: kept["cells"][number][2])
    quick = [number for number in order if kept["cells"][number][2] < QUICK_SECONDS]
    for number in Random(f"{paper} {name}").sample(quick, min(3, len(quick))) or order[:1]:
        first = sum(count for _, count, _ in kept["cells"][:number])
        expected = kept["rows"][first : first + kept["cells"][number][1]]
        rows = json.loads(json.dumps(list(cells[number].rows())))
        assert [_steady(row, table.timed) for row in rows] == [
            {key: _near(paper, key, value) for key, value in _steady(row, table.timed).items()} for row in expected
        ]


def _steady(row: dict[str, Any], timed: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in timed}


def _near(paper: str, key: str, value: Any) -> Any:
    """The value with its tolerance: KIWI's solves end by time, within a few per cent of the best."""
    if not isinstance(value, float | int) or isinstance(value, bool):
        return value
    return pytest.approx(value, rel=0.05 if paper == "kiwi" and key in ("cost", "step_ms", "peak_gb") else 1e-9)


def test_exact_plans_are_never_slower_than_those_of_the_searches() -> None:
    """In every kept row: the exact search begins with the plans of the others."""
    compared = 0
    for name, rows in kept_results("galvatron").rows.items():
        for row in rows:
            for search in ("published", "printed", "repaired"):
                if row.get(f"{search}_rate") is not None:
                    compared += 1
                    assert row["rate"] >= row[f"{search}_rate"], (name, row)
            if row.get("rate_bound") is not None:
                assert row["rate"] <= row["rate_bound"] * (1 + 1e-12), (name, row)
        if name.startswith("table_4"):
            cells: dict[tuple[str, int], dict[str, float | None]] = {}
            for row in rows:
                cells.setdefault((row["model"], row["memory_gb"]), {})[row["strategy"]] = row["rate"]
            for rates in cells.values():
                assert all(rate is None or rate <= (rates["exact"] or 0.0) for rate in rates.values()), name
                compared += len(rates)
    assert compared > 300
    for name in ("figure_6_hybrid", "figure_6_pipeline", "figure_9"):
        peaks: dict[tuple[object, ...], dict[str, float]] = {}
        for row in kept_results("capture").rows[name]:
            case = row["model"], row["batch"], row["schedule"], row["gpus"]
            peaks.setdefault(case, {})[row["solver"]] = row["peak_gb"]
        for case, solvers in peaks.items():
            assert solvers["exact"] <= min(solvers.values()), (name, case)


def test_the_pages_are_made_of_the_kept_results() -> None:
    results = [kept_results(paper) for paper in PAPERS]
    rows = [row for each in results for row in paper_claims(each)]
    assert (KEPT_RESULTS / "CLAIMS.md").read_text(encoding="utf-8") == markdown(rows, results)
    for each in results:
        assert (KEPT_RESULTS / f"{each.paper}.md").read_text(encoding="utf-8") == results_page(each)
