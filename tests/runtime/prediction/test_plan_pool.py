"""Plans in processes that stay: the numbers of a launch, plan after plan, also behind one that fails."""

from __future__ import annotations

import pytest
from support.steps.planned_steps import random_plan, step_reference
from support.tiers import fuzz, slow

from planner.session import PlanningSession
from runtime.job.launch import run_plan
from runtime.job.process_group import LaunchError
from runtime.prediction import plan_pool
from runtime.prediction.plan_pool import PlanPool
from runtime.prediction.random_plans import random_plans


def plans_of(name, mesh, count):
    return list(random_plans(PlanningSession(step_reference(name), "a100-8-nvlink", mesh), count))


def test_every_plan_begins_from_its_seed(monkeypatch):
    """Models, numbers of ranks, and processes that are started anew change nothing."""
    monkeypatch.setattr(plan_pool, "PLANS_OF_PROCESSES", 3)
    first, second = plans_of("gpt2", (2,), 2)
    (other,) = plans_of("mlp", (2,), 1)
    with PlanPool() as pool:
        reports = [pool.run(plan, 3) for plan in (first, second, other, first)]
    assert reports[0].loss == reports[3].loss
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-4)
    for plan, report in zip((first, second, other, first), reports, strict=True):
        assert report.plan_digest == plan.digest
        assert report.measured_peak_bytes == report.predicted_peak_bytes == [plan.peak_bytes] * 2
        assert report.measured_step_s > 0


@pytest.mark.parametrize("mesh", [slow((2,)), fuzz((2, 2))])
def test_a_plan_in_the_pool_gives_what_a_launch_gives(mesh):
    plans = plans_of("llama", mesh, 2)
    with PlanPool() as pool:
        for plan in plans:
            pooled, launched = pool.run(plan, 3), run_plan(plan, steps=3, device="cpu")
            assert pooled.loss == launched.loss
            assert pooled.measured_peak_bytes == launched.measured_peak_bytes


def test_a_plan_that_fails_has_one_line_and_the_next_one_runs():
    plan = random_plan("mlp", (2,), 0)
    huge = plan.model_copy(
        update={
            "decision": plan.decision.model_copy(
                update={"predicted": plan.decision.predicted.model_copy(update={"peak_bytes": 2**60})}
            )
        }
    )
    with PlanPool() as pool:
        with pytest.raises(LaunchError, match=r"the plan holds \d") as error:
            pool.run(huge, 2)
        assert "\n" not in str(error.value)
        assert pool.run(plan, 2).measured_step_s > 0
