"""Plans that an earlier version wrote, before its modules moved: they still load, explain themselves and run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiers import slow

from planner.models.references import ModelReference, load_step
from planner.plan.document import load_plan

PLANS = Path(__file__).parents[2] / "fixtures" / "plans"
OPERATOR_PLANS = ("kiwi_chain", "kiwi_offload")


@pytest.mark.parametrize("name", OPERATOR_PLANS)
def test_they_load(name: str) -> None:
    assert load_plan(PLANS / f"{name}.json").decision.options.formulation == name


@pytest.mark.parametrize("name", ["kiwi_chain", slow("kiwi_offload"), "galvatron"])
def test_they_explain_themselves(name, meshwright) -> None:
    ended = meshwright("explain", PLANS / f"{name}.json")
    assert ended.code == 0
    assert "transformer" in ended.out or "stage 0" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OPERATOR_PLANS, "galvatron"])
def test_they_run_like_one_process(name, meshwright) -> None:
    ended = meshwright("run", PLANS / f"{name}.json", "--steps", 1, "--check")
    assert ended.code == 0, ended.err
    assert "gradients" in ended.out


def test_a_model_of_ours_is_found_under_its_former_name() -> None:
    former = load_step(ModelReference("planner.paper_models:encoder", batch=2, sequence=8, layers=1))
    today = load_step(ModelReference("planner.papers.kiwi.models:encoder", batch=2, sequence=8, layers=1))
    assert type(former.module) is type(today.module)
