"""Plans of the one model that run: a row for each plan, equal plans run once, refused ones have a note."""

from __future__ import annotations

import pytest
from support.steps.planned_steps import step_reference
from support.tiers import slow

from formulations.galvatron.uniform import baselines
from planner.layers.plan.settings import strategy_settings
from planner.papers.claims import one_model
from planner.papers.claims.claim import PAPERS
from planner.papers.claims.one_model import BASELINES, DEVICES, OneModelCase, beside_cases, one_model_cases
from planner.papers.claims.results import kept_results
from runtime.job.process_group import LaunchError
from runtime.prediction.local_tables import one_model as runs
from runtime.prediction.local_tables.one_model import one_model_runs
from runtime.prediction.local_tables.registry import local_tables


@pytest.fixture
def small(monkeypatch):
    """The smallest GPT-2 in place of the whole one."""
    monkeypatch.setattr(one_model, "REFERENCE", step_reference("gpt2"))
    monkeypatch.setattr(runs, "_runs", {})
    for cached in (one_model._chain, one_model._session):
        cached.cache_clear()
    yield
    for cached in (one_model._chain, one_model._session):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("paper", "number"), [("h3t", 1), slow("kiwi", 0), slow("osdp", 2), slow("galvatron", 1), slow("capture", 2)]
)
def test_a_plan_runs_once_and_gives_the_numbers_of_one_process(paper, number, small, monkeypatch):
    cell = list(one_model_runs(paper).cells())[number]
    (row,) = cell.rows()
    case = list(one_model_cases(paper))[number]
    assert (row["planner"], row["way"], row["limit_gb"]) == (case.planner, case.way, case.limit / 1e9)
    assert row["failures"] == []
    assert row["loss_error"] <= 1e-5
    assert 0 < row["measured_bytes"] <= 1.05 * row["predicted_bytes"]
    monkeypatch.setattr(runs, "run_steps", None)
    assert list(cell.rows()) == [row]


def test_a_plan_that_does_not_run_has_a_note(small, monkeypatch):
    def refuse(*args, **kwargs):
        raise LaunchError("the plan holds too much")

    monkeypatch.setattr(runs, "run_steps", refuse)
    (row,) = next(iter(one_model_runs("galvatron").cells())).rows()
    assert (row["measured_bytes"], row["note"]) == (None, "the plan holds too much")
    monkeypatch.setattr(one_model, "SHARES", (1,))
    assert [row for cell in one_model_runs("galvatron").cells() for row in cell.rows()] == []


def test_baselines_run_where_they_are_named(small, monkeypatch):
    asked = []
    monkeypatch.setattr(runs, "_measured", lambda plan: asked.append(plan) or {"note": ""})
    cells = list(local_tables("osdp")["baseline_runs"].cells())
    assert [cell.label for cell in cells[:2]] == ["250 %, ddp", "250 %, fsdp"]
    assert [row["way"] for cell in cells[:2] for row in cell.rows()] == ["ddp", "fsdp"]
    assert [{layer.shards for layer in plan.stages[0].layers} for plan in asked] == [{1}, {DEVICES}]
    assert "baseline_runs" not in local_tables("h3t")


RUNS = [(paper, "one_model_runs") for paper in PAPERS] + [
    (paper, "baseline_runs") for paper in BASELINES if "baseline_runs" in kept_results(paper).tables
]
"""Tables of runs; those of the baselines need not be kept."""


@pytest.mark.parametrize(("paper", "table"), RUNS)
def test_kept_plans_hold_what_they_predict_and_give_the_numbers_of_one_process(paper, table):
    """At full size: peaks within 1 per cent above; only plans that fill a machine of 24 GB did not run."""
    rows = kept_results(paper).rows[table]
    beside = table == "baseline_runs"
    kept = [row for row in kept_results(paper).rows["one_model"] if (row["way"] in BASELINES.get(paper, ())) == beside]
    planned = [row for row in kept if row["step_ms"] is not None]
    assert len(rows) == len(planned)
    ran = [row for row in rows if row["measured_bytes"] is not None]
    for row in rows:
        if row not in ran:  # refused, or ended by the operating system: the check's reference needs memory as well
            assert "this machine, shared by 4 ranks, has" in row["note"] or "SIGKILL" in row["note"], row
            assert DEVICES * row["predicted_bytes"] > 18e9, row
    assert len(ran) >= len(rows) - 1
    for row in ran:
        assert row["failures"] == [], row
        assert 0.97 <= row["measured_bytes"] / row["predicted_bytes"] <= 1.01, row


def test_cases_have_labels_of_their_own():
    found = [[case.label for case in (*one_model_cases(paper), *beside_cases(paper))] for paper in PAPERS]
    assert OneModelCase("kiwi", "", 250).label == "250 %, kiwi"
    assert all(len(set(labels)) == len(labels) for labels in found)
    assert list(map(len, found)) == [12 + 2, 18 + 12, 18 + 30, 18, 18]


@pytest.mark.parametrize("planner", BASELINES)
def test_baselines_have_the_stages_and_the_strategy_of_their_name(planner, small):
    """Memory is ample. OSDP has no tensor parallelism, so that it does not say which layers that leaves undivided."""
    chain = {layer.name: layer for layer in one_model._chain(modules=planner == "osdp").layers}
    for name in BASELINES[planner]:
        plan, uniform = OneModelCase(planner, name, 10_000).plan(), baselines(DEVICES)[name]
        assert len(plan.stages) == uniform.stages, name
        for layer in (layer for stage in plan.stages for layer in stage.layers):
            expected = strategy_settings(chain[layer.name], uniform.strategies[0])
            written = {"shard_degree": expected.shard_degree, "undivided": expected.undivided}
            assert layer.model_copy(update=written) == expected, name
            assert layer.shards == expected.shards, name
