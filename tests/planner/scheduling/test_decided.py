"""Decisions read back from schedules: the schedule that is built of them is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.steps.planned_steps import strategy_space

from planner.common.plan_error import PlanError
from planner.schedule.instructions import Buffer
from planner.scheduling.builder import build_schedule
from planner.scheduling.decided import decision_of
from planner.strategies.random_decision import random_decision


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "mesh"), [("gpt2", (2,)), ("llama", (2, 2))])
def test_the_decision_of_a_schedule_gives_the_schedule(name, mesh, seed):
    space = strategy_space(name, mesh)
    schedule = build_schedule(space, random_decision(space, seed))
    found = decision_of(space, schedule)
    assert found.recomputed
    assert build_schedule(space, found) == schedule


def test_a_placement_without_a_rule_is_refused():
    space = strategy_space("gpt2", (2,))
    schedule = build_schedule(space, random_decision(space, 0))
    first = schedule.inputs[0]
    strange = tuple(
        Buffer(buffer.value, ("S9",)) if number == first else buffer for number, buffer in enumerate(schedule.buffers)
    )
    with pytest.raises(PlanError, match=r"is placed as no rule of this version allows: plan again"):
        decision_of(space, replace(schedule, buffers=strange))
