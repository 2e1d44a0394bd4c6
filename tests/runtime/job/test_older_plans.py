"""Plans that an earlier version wrote, before its modules moved: they still load, explain themselves and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiers import fuzz

from planner.models.references import ModelReference, load_step
from planner.plan.document import load_plan

PLANS = Path(__file__).parents[2] / "fixtures" / "plans"
OPERATOR_PLANS = ("kiwi_chain", "kiwi_offload")


@pytest.mark.parametrize("name", OPERATOR_PLANS)
def test_they_load(name: str) -> None:
    assert load_plan(PLANS / f"{name}.json").decision.options.formulation == name


@pytest.mark.parametrize("name", ["kiwi_chain", fuzz("kiwi_offload"), "galvatron"])
def test_they_explain_themselves(name, meshwright) -> None:
    ended = meshwright("explain", PLANS / f"{name}.json")
    assert ended.code == 0
    assert "transformer" in ended.out or "stage 0" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kiwi_offload", "galvatron"])
def test_they_run_like_one_process(name, meshwright) -> None:
    ended = meshwright("run", PLANS / f"{name}.json", "--steps", 1, "--check")
    assert ended.code == 0, ended.err
    assert "gradients" in ended.out


@pytest.mark.slow
def test_a_run_is_compared_with_one_process_and_profiled(meshwright, tmp_path) -> None:
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    arguments = "--steps", 2, "--check", "--report", report, "--profile", trace
    ended = meshwright("run", PLANS / "kiwi_chain.json", *arguments)
    assert ended.code == 0, ended.err
    for heading in ("by kind", "by module", "waiting for other ranks", "peak of rank 1"):
        assert heading in ended.out
    assert json.loads(trace.read_text())["traceEvents"]
    found = json.loads(report.read_text())
    assert found["loss"][0] == pytest.approx(found["reference_loss"][0], rel=1e-5)
    assert found["max_grad_rel_error"] <= 1e-4
    assert len(found["measured_peak_bytes"]) == 2


def test_a_model_of_ours_is_found_under_its_former_name() -> None:
    former = load_step(ModelReference("planner.paper_models:encoder", batch=2, sequence=8, layers=1))
    today = load_step(ModelReference("planner.papers.kiwi.models:encoder", batch=2, sequence=8, layers=1))
    assert type(former.module) is type(today.module)
