"""The results that pages and notebooks show: all cells are there, and have the same rows when computed again.

The fast and the slow tests compute as many cells of a table again as some seconds allow, three if they do. `make fuzz`
computes three of each of the others, those of local runs included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from random import Random
from typing import Any

import pytest

from formulations.kiwi.of_step import MOST_OPERATORS
from planner.papers.cells import Table
from planner.papers.claims.claim import PAPERS
from planner.papers.claims.report import markdown, results_page
from planner.papers.claims.results import KEPT_RESULTS, kept_results, paper_claims, tables_of
from planner.session.formulations import PUBLISHED
from runtime.prediction.local_tables.registry import local_tables

LOCAL = {paper: local_tables(paper) for paper in PAPERS}
"""Tables of runs on one machine, which may be kept."""

LEFT_OUT = {("kiwi", "table_1_published_long")}
"""Tables of hours, which need not be kept."""

CELLS = 3
"""Cells of a table that are computed again."""

QUICK_SECONDS, MOST_SECONDS = 1.0, 4.0
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

AS_ANOTHER = {
    **{("kiwi", name): "figure_6" for name in ("figure_5_encoder", "figure_5_decoder", "figure_6_plans")},
    **{("kiwi", name): "figure_6" for name in ("sequence_lengths", "twenty_layers", "llama", "one_model")},
    **{("galvatron", name): "table_3" for name in ("table_5", "table_5_inferred")},
    **{("h3t", name): "table_1" for name in ("table_1_inferred", "exact_free")},
}
"""Tables that take 10 to 50 s to prepare or for a cell, and the one that is made by the same code: that is computed
again by the slow tests, these by ``make fuzz``."""

EVERY: Mapping[tuple[str, str], Table] = {
    (paper, name): table for paper in PAPERS for name, table in {**tables_of(paper), **LOCAL[paper]}.items()
}


def test_what_stands_for_a_long_table_is_computed_again_by_the_slow_tests() -> None:
    for (paper, name), other in AS_ANOTHER.items():
        assert (paper, name) in EVERY
        assert (paper, other) not in AS_ANOTHER
        assert not EVERY[paper, other].named_only


def _quick_cells(paper: str, name: str) -> list[int]:
    """Numbers of three cells, chosen among the quick ones; where these are fewer, as many as the seconds allow."""
    seconds = [cell[2] for cell in kept_results(paper).tables[name]["cells"]]
    quick = [number for number, each in enumerate(seconds) if each < QUICK_SECONDS]
    chosen = Random(f"{paper} {name}").sample(quick, min(CELLS, len(quick)))
    for number in sorted(range(len(seconds)), key=seconds.__getitem__):
        if len(chosen) < CELLS and number not in chosen:
            if chosen and sum(seconds[each] for each in [*chosen, number]) > MOST_SECONDS:
                break
            chosen.append(number)
    return chosen


def _cheapest_cells(paper: str, name: str) -> list[int]:
    """Numbers of the three cells that took the least time."""
    seconds = [cell[2] for cell in kept_results(paper).tables[name]["cells"]]
    return sorted(range(len(seconds)), key=seconds.__getitem__)[:CELLS]


def _is_long(paper: str, name: str) -> bool:
    """Whether a table has cells that take seconds each, or prepare or measure something before."""
    if name in LOCAL[paper] or EVERY[paper, name].named_only or (paper, name) in AS_ANOTHER:
        return True
    kept = kept_results(paper).tables.get(name)
    return kept is None or len(_quick_cells(paper, name)) < min(CELLS, len(kept["cells"]))


def _assert_same_rows(paper: str, name: str, numbers: Sequence[int]) -> None:
    table, kept = EVERY[paper, name], kept_results(paper).tables[name]
    cells = list(table.cells())
    for number in numbers:
        first = sum(count for _, count, _ in kept["cells"][:number])
        expected = kept["rows"][first : first + kept["cells"][number][1]]
        rows = json.loads(json.dumps(list(cells[number].rows())))
        assert len(rows) == len(expected)
        for row, known in zip(rows, expected, strict=True):
            searched = _searched(row, known) if paper == "kiwi" else _bounded(row, known)
            assert _steady(row, table.timed | searched) == {
                key: _near(paper, key, value) for key, value in _steady(known, table.timed | searched).items()
            }


@pytest.mark.parametrize("paper", PAPERS)
def test_all_cells_are_kept(paper: str) -> None:
    results, made = kept_results(paper), tables_of(paper)
    kept, known = results.tables, {**made, **LOCAL[paper]}
    assert made.keys() - {name for _, name in LEFT_OUT} <= kept.keys() <= known.keys()
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
    [
        pytest.param(*each, marks=() if each in CHEAP else pytest.mark.slow, id="-".join(each))
        for each, table in EVERY.items()
        if each[1] not in LOCAL[each[0]] and not table.named_only and each not in AS_ANOTHER
    ],
)
def test_quick_cells_have_the_same_rows_again(paper: str, name: str) -> None:
    _assert_same_rows(paper, name, _quick_cells(paper, name))


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("paper", "name"),
    [
        pytest.param(*each, id="-".join(each))
        for each in EVERY
        if _is_long(*each) and each[1] in kept_results(each[0]).tables
    ],
)
def test_three_cells_of_long_tables_have_the_same_rows_again(paper: str, name: str) -> None:
    _assert_same_rows(paper, name, _cheapest_cells(paper, name))


def _searched(row: dict[str, Any], known: dict[str, Any]) -> set[str]:
    """Columns with bounds, which the other row must keep: searches end by time, so values depend on the machine."""
    found = set()
    for key in ("cost", "step_ms", "peak_gb"):
        values, bounds = (row.get(key), known.get(key)), (_bound(row, key), _bound(known, key))
        if None not in (*values, *bounds):
            assert values[0] >= bounds[1] * (1 - 1e-9), (key, row, known)
            assert values[1] >= bounds[0] * (1 - 1e-9), (key, row, known)
            found.add(key)
    return found


def _bounded(row: dict[str, Any], known: dict[str, Any]) -> set[str]:
    """Bounds on a rate that a search ending by time has proven, which the other row's rate must keep."""
    rates, bounds = (row.get("rate"), known.get("rate")), (row.get("rate_bound"), known.get("rate_bound"))
    if None in (*rates, *bounds):
        return set()
    assert rates[0] <= bounds[1] * (1 + 1e-9), (row, known)
    assert rates[1] <= bounds[0] * (1 + 1e-9), (row, known)
    return {"rate_bound"}


def _bound(row: dict[str, Any], key: str) -> float | None:
    """What no plan is below, of a column with the objective of a search."""
    if key == "cost" and row.get(key) is not None and row.get("gap_percent") is not None:
        return float(row[key]) * (1 - row["gap_percent"] / 100)
    return row.get({"step_ms": "bound_ms", "peak_gb": "least_gb"}.get(key, ""))


def _steady(row: dict[str, Any], timed: Set[str]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in timed}


def _near(paper: str, key: str, value: Any) -> Any:
    """The value with its tolerance: where KIWI's solves have no bound, they end within a few per cent of the best."""
    if not isinstance(value, float | int) or isinstance(value, bool):
        return value
    return pytest.approx(value, rel=0.05 if paper == "kiwi" and key in ("cost", "step_ms", "peak_gb") else 1e-9)


def test_the_programs_that_kiwi_published_are_refused_for_their_size() -> None:
    rows = [row for row in kept_results("kiwi").rows["one_model"] if row["planner"].endswith("_published")]
    assert {row["planner"] for row in rows} == set(PUBLISHED.values())
    for row in rows:
        assert row["step_ms"] is None
        assert f"with more than {MOST_OPERATORS[row['planner']]}; use kiwi_chain" in row["note"]


def test_the_pages_are_made_of_the_kept_results() -> None:
    results = [kept_results(paper) for paper in PAPERS]
    rows = [row for each in results for row in paper_claims(each)]
    assert (KEPT_RESULTS / "CLAIMS.md").read_text(encoding="utf-8") == markdown(rows, results)
    for each in results:
        assert (KEPT_RESULTS / f"{each.paper}.md").read_text(encoding="utf-8") == results_page(each)
