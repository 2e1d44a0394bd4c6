"""Limits on what a step holds besides gradients: tables and replay leave the same bytes out."""

from __future__ import annotations

import pytest
from support.steps.planned_steps import step_reference

from formulations.step.replay import replay_decision
from planner.papers.kiwi.dynamic_memory import UncountedGradients
from planner.replay.report import Category, ViolationKind
from planner.session import PlanningSession, PlanRequest
from planner.strategies.random_decision import random_decision

CLUSTER = "a100-8-nvlink"


@pytest.mark.fast_cases("lora_gpt", "gpt2")
@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "lora_gpt"])
def test_tables_and_replay_leave_out_the_same(name):
    here = UncountedGradients(step_reference(name), CLUSTER, (1,))
    counted = PlanningSession(step_reference(name), CLUSTER, (1,))
    for seed in range(6):
        decision = random_decision(here.space, seed)
        schedule = here.schedule(decision)
        report, whole = here.replay(schedule), counted.replay(schedule)
        gradients = whole.profile.during(Category.GRADIENTS)
        assert gradients.max() > 0
        assert report.peak_bytes == replay_decision(here.space.model, decision).peak
        assert report.peak_bytes == (whole.profile.total_during - gradients).max()
        assert report.total_quanta == whole.total_quanta
        assert not here.replay(schedule, report.peak_bytes).violations
        assert here.replay(schedule, report.peak_bytes - 1).kinds == {ViolationKind.OVER_LIMIT}


def test_gradients_are_left_out_on_one_device_only():
    with pytest.raises(ValueError, match="mesh 2: gradients can be left out of the memory on one device only"):
        UncountedGradients(step_reference("mlp"), CLUSTER, (2,)).problem(PlanRequest())
