"""What objects show of themselves in a notebook and in error messages: a line each, whatever they hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.steps.planned_steps import step_reference

from formulations.problem.solution import Status
from planner.benchmarks.results import BenchResult, BenchRow
from planner.common.units import format_bytes
from planner.explanation import Explanation, explain_plan
from planner.explore.exploration import Exploration
from planner.fits import FitsReport, fits_report
from planner.session import PlanningSession, PlanRequest
from planner.view.opened import open_plan

ROW = BenchRow("a", "random", "x", Status.FEASIBLE, 10, 9, 0.1, 2.0, 1.0, 5, 0.0, 6, 3.0, 0, None, "", "", ())


@pytest.fixture(scope="module")
def explored():
    session = PlanningSession(step_reference("mlp"), "a100-8-nvlink", (2,))
    with Exploration(session, PlanRequest(time_limit=5.0, solver="lagrangian", workers=1)) as here:
        yield here


@pytest.fixture(scope="module")
def explanation(explored) -> Explanation:
    return explain_plan(explored.session, explored.plan, time_limit=1.0)


def test_all_show_a_line_that_says_what_they_are(explored, explanation):
    session, plan = explored.session, explored.plan
    rows = (ROW, replace(ROW, instance="b"), replace(ROW, solver="y"))
    graph = f"<graph of {len(session.graph.operators)} operators on {len(session.graph.values)} values>"
    within = f"<solution within {format_bytes(explored.solution.case.tensor_bytes)} under 0 pins: "
    shown = {
        graph: session.graph,
        f"<traced step {session.traced.fingerprint[:12]}: {graph}>": session.traced,
        f"{within}{plan!r}>": explored.solution,
        f"<plan.json: {plan!r}>": open_plan("plan.json", plan, session=session),
        "<benchmark of 2 instances by 2 solvers: 3 rows>": BenchResult(rows),
        "<benchmark of 0 instances by 0 solvers: 0 rows, interrupted>": BenchResult((), interrupted=True),
        f"<explanation: {', '.join(section.title for section in explanation.sections)}>": explanation,
    }
    for text, thing in shown.items():
        assert repr(thing) == text
        assert "\n" not in text
        assert len(text) < 300


def test_explanations_and_reports_are_saved(explored, explanation, tmp_path):
    report = fits_report(explored.session.graph, 2, explored.session.optimizer, 2**30)
    for number, thing in enumerate((explanation, report)):
        thing.save(tmp_path / f"{number}.json")
    sections = json.loads((tmp_path / "0.json").read_text())["sections"]
    assert [(each["title"], tuple(each["lines"])) for each in sections] == [
        (section.title, section.lines) for section in explanation.sections
    ]
    kept = json.loads((tmp_path / "1.json").read_text())
    assert (kept["limit"], [row["peak_bytes"] for row in kept["rows"]]) == (
        2**30,
        [row.peak_bytes for row in report.rows],
    )


def test_explanations_and_reports_are_data_frames(explored, explanation):
    pytest.importorskip("pandas")
    frame = explanation.to_pandas()
    assert list(frame.columns) == ["section", "line"]
    assert list(frame["line"]) == [line for section in explanation.sections for line in section.lines]
    report: FitsReport = fits_report(explored.session.graph, 2, explored.session.optimizer, 2**30)
    assert list(report.to_pandas()["peak_bytes"]) == [row.peak_bytes for row in report.rows]
    assert list(report.to_pandas().columns) == ["name", "kind", "peak_bytes", "fits"]
