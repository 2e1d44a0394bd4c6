"""Plans are made of clean replays only, and hold only where a replay gives what they promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.steps.plan_case import (
    CERTIFICATE,
    FINGERPRINTS,
    MODEL,
    OPTIONS,
    PLAN,
    RECORD,
    made,
    verified,
)
from support.steps.replay_case import GRAPH, SCHEDULE, Prices, check

from formulations.problem.solution import Status
from planner.plan.document import (
    CrossCheck,
    Fingerprints,
    PlanError,
    make_plan,
    verify_plan,
)


@pytest.mark.parametrize("name", Fingerprints.model_fields)
def test_other_fingerprint_is_named_with_both_values(name):
    here = FINGERPRINTS.model_copy(update={name: "d" * 64})
    was = getattr(FINGERPRINTS, name) or "none"
    with pytest.raises(
        PlanError, match=rf"something else: .+ \({name} is {'d' * 12}, the plan has {was[:12]}\): plan again"
    ):
        verify_plan(PLAN, GRAPH, here)


def plan_with(**changes):
    return PLAN.model_copy(update={"decision": PLAN.decision.model_copy(update=changes)})


def test_promises_are_held_against_the_replay():
    class Dearer(Prices):
        def update_quanta(self, parameter, placement):
            return 2

    with pytest.raises(PlanError, match=r"a step takes \d+ ns, \d+ ns predicted"):
        verified(PLAN, seconds=Dearer())
    lower = PLAN.decision.predicted.model_copy(update={"peak_bytes": 1000})
    with pytest.raises(PlanError, match="the peak is 1160 bytes, 1000 predicted"):
        verified(plan_with(predicted=lower))
    tighter = OPTIONS.model_copy(update={"memory_bytes": OPTIONS.memory_bytes - 100})
    with pytest.raises(PlanError, match=r"over_limit: .* 60 more than the limit of 1100"):
        verified(plan_with(options=tighter))
    with pytest.raises(PlanError, match=r"strategy: net/forward/aten\.t/0 has no rule"):
        verified(PLAN, allowed=lambda operator: set())
    with pytest.raises(PlanError, match=r"mesh \(2,\) has 2 ranks, the job has 4"):
        verified(PLAN, devices=4)


def test_plans_are_made_of_clean_replays_with_costs_only():
    given_ = {"model": MODEL, "options": OPTIONS, "fingerprints": FINGERPRINTS, "bound_ns": None, "record": RECORD}
    with pytest.raises(PlanError, match="replayed without costs"):
        make_plan(GRAPH, SCHEDULE, check(SCHEDULE), **given_)
    broken = replace(SCHEDULE, instructions=SCHEDULE.instructions[:-1])
    with pytest.raises(PlanError, match="never_freed"):
        make_plan(GRAPH, broken, check(broken, seconds=Prices()), **given_)
    small = {**given_, "options": OPTIONS.model_copy(update={"memory_bytes": 1400})}
    with pytest.raises(PlanError, match="needs 1160 bytes, 1100 are allowed"):
        make_plan(GRAPH, SCHEDULE, check(SCHEDULE, seconds=Prices()), **small)
    with pytest.raises(PlanError, match="solvers contradict one another: highs has a plan of"):
        made(bound_ns=10**9)


def test_verification_refuses_contradictions():
    check_ = CrossCheck(solver="greedy", status=Status.FEASIBLE, objective_ns=1)
    certificate = CERTIFICATE.model_copy(update={"cross_checks": (check_,)})
    record = RECORD.model_copy(update={"certificate": certificate})
    with pytest.raises(PlanError, match="contradicts itself: greedy has a plan of 1 ns, below the optimum"):
        verified(PLAN.model_copy(update={"record": record}))
