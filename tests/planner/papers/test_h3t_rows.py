"""Kept rows of H3T: the exact plan is never dearer than a search's on the same problem, in every row."""

from __future__ import annotations

import pytest

from formulations.h3t.free import solve_free
from formulations.h3t.problem import simulate
from formulations.problem.solution import SolveOptions, Status
from planner.papers.claims.results import kept_results, tables_of
from planner.papers.h3t.free_tables import RANDOM_LAYERS, random_step
from planner.papers.h3t.searches import FIGURE_6_COLUMNS, FIGURE_6_SHARES
from planner.papers.hardware import Hardware

ROWS = kept_results("h3t").rows
COMPARED = {
    "exact": ("dp_printed", "dp_published", "dp", "dp_up"),
    "exact_on_device": ("all_on", "zero2", "zero3"),
    "exact_free": ("exact", "greedy_printed", "greedy", "uniform", "random"),
}
"""Searches by the exact row of their problem: synchronized at the paper's limit; synchronized with the whole device;
with synchronization as a choice, at the paper's limit."""


@pytest.mark.parametrize("exact", COMPARED)
@pytest.mark.parametrize("hardware", Hardware)
def test_exact_is_never_dearer_than_a_search_on_the_same_problem(exact: str, hardware: Hardware) -> None:
    table = {Hardware.PRESET: "table_1", Hardware.INFERRED: "table_1_inferred"}[hardware]
    free = [row for row in ROWS["exact_free"] if row["hardware"] == hardware]
    rows = {(row["column"], row["solver"]): row for row in [*ROWS[table], *free]}
    compared = 0
    for column in {column for column, _ in rows}:
        best = rows[column, exact]
        assert best["bound"] is None or best["bound"] <= best["seconds"]
        for search in COMPARED[exact]:
            row = rows[column, search]
            assert (row["limit_gb"], row["optimizer"]) == (best["limit_gb"], best["optimizer"])
            if row["seconds"] is not None:
                compared += 1
                assert best["seconds"] <= row["seconds"], (column, search)
    assert compared >= 12
    assert {solver for _, solver in rows} == {*COMPARED, *(each for names in COMPARED.values() for each in names)}


def test_every_limit_of_figure_6_is_proven() -> None:
    rows = ROWS["figure_6"]
    for hardware in Hardware:
        of = [row for row in rows if row["hardware"] == hardware]
        assert len(of) == len(FIGURE_6_COLUMNS) * len(FIGURE_6_SHARES) == 28
    for row in rows:
        assert row["proven"]
        assert row["bound"] == row["exact"]
        assert all(row[search] is None or row["exact"] <= row[search] for search in ("dp", "dp_up"))


def test_both_readings_of_the_optimizer_have_one_treatment_each() -> None:
    rows = ROWS["optimizer"]
    assert {row["optimizer"] for row in rows} == {"overlapped", "at_the_end", "left_out"}
    exact = {(row["column"], row["optimizer"]): row for row in rows if row["solver"] == "exact"}
    for row in rows:
        best = exact[row["column"], row["optimizer"]]
        if row["solver"].startswith("dp") and row["seconds"] is not None:
            assert best["seconds"] <= row["seconds"]
    for column, optimizer in exact:
        assert exact[column, "left_out"]["seconds"] <= exact[column, optimizer]["seconds"]


def test_no_search_of_figure_6_is_below_the_exact_plan_of_its_problem() -> None:
    """Synchronized searches have the exact synchronized plan, and all of them that with free synchronization."""
    free = {(row["hardware"], row["column"], round(row["limit_gb"], 3)): row for row in ROWS["figure_6_free"]}
    assert len(free) == len(ROWS["figure_6"]) == 56
    better = 0
    for row in ROWS["figure_6"]:
        best = free[row["hardware"], row["column"], round(row["limit_gb"], 3)]
        for name in ("dp", "dp_up", "greedy", "uniform", "random", "exact"):
            if row[name] is not None:
                assert best["bound"] <= best["seconds"] <= row[name], (name, row)
                assert not name.startswith("dp") or row["exact"] <= row[name], (name, row)
        better += row["exact"] is not None and best["seconds"] < row["exact"]
    assert better, "synchronization costs somewhere"


def test_each_way_of_free_synchronization_is_kept_where_it_is_better() -> None:
    rows = ROWS["free_restated"]
    few = [row for row in rows if row["layers"] <= 4]
    proven = {way: sum(row["proven"] for row in few if row["way"] == way) for way in ("event model", "program")}
    assert proven["event model"] >= 2 * max(1, proven["program"])
    columns = {way: [row for row in rows if row["layers"] == 48 and row["way"] == way] for way in proven}
    gaps = [(a["gap"], b["gap"]) for a, b in zip(columns["event model"], columns["program"], strict=True)]
    assert all(program < model for model, program in gaps)
    assert sum(program < model / 2 for model, program in gaps) >= 3  # of four columns


@pytest.mark.parametrize("layers", [each for each in RANDOM_LAYERS if each < 4])
def test_random_steps_have_plans_and_limits_that_bind(layers: int) -> None:
    step = random_step(layers, 0)
    assert simulate(step, (0,) * layers).peak > step.memory_limit
    found = solve_free(step, options=SolveOptions(time_limit=30.0))
    assert found.status is Status.OPTIMAL
    assert found.outcome is not None
    assert found.outcome.peak <= step.memory_limit


def test_labels_are_made_without_solving() -> None:
    tables = tables_of("h3t")
    assert len(list(tables["exact_free"].cells())) == 24
    assert len(list(tables["figure_6"].cells())) == 56
