"""Steps of several micro-batches: priced, counted and checked as they run."""

from __future__ import annotations

import pytest
from support.steps.planned_steps import step_reference

from planner import api
from planner.common.plan_error import PlanError
from planner.plan.check import verify_plan
from planner.plan.decision import NANOSECONDS
from planner.plan.document import schedule_of
from planner.session import PlanningSession, PlanRequest, session_of


@pytest.mark.slow
def test_a_step_of_micro_batches_is_planned_with_their_sums():
    one = PlanningSession(step_reference("mlp"), "a100-8-nvlink", (2,))
    four = PlanningSession(step_reference("mlp"), "a100-8-nvlink", (2,), traced=one.traced, grad_accum=4)
    summed = four.plan(PlanRequest(formulation="sharding", solver="tree_dp", time_limit=300, workers=1))
    alone = one.replay(schedule_of(summed, one.graph))
    assert summed.decision.options.grad_accum == 4
    assert alone.peak_bytes < summed.peak_bytes
    assert 2 * alone.total_quanta < summed.objective_seconds * NANOSECONDS < 6 * alone.total_quanta
    assert summed.bound_seconds <= summed.objective_seconds
    assert "batch 16 in 4 micro-batches" in summed.summary()
    again = session_of(summed)
    verify_plan(summed, again.graph, again.fingerprints, seconds=again.instruction_costs)


def test_what_cannot_be_cut_is_refused():
    options = {"cluster": "a100-8-nvlink", "mesh": (2,)}
    with pytest.raises(PlanError, match="grad_accum 3: a batch of 4 cannot be cut into as many micro-batches"):
        api.plan(step_reference("mlp"), grad_accum=3, **options)
    with pytest.raises(PlanError, match="grad_accum 2: galvatron plans layers, and their micro-batches with them"):
        api.plan(step_reference("gpt2"), grad_accum=2, formulation="galvatron", **options)
