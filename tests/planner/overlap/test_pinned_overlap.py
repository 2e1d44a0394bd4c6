"""Overlapped plans with pins: they keep them, and their bounds are over the plans that do."""

from __future__ import annotations

from functools import cache

import pytest
from support.steps.planned_steps import step_reference

from planner import api
from planner.explore.errors import ExploreError
from planner.machine.cluster import load_cluster
from planner.plan.decision import Pin
from planner.plan.document import Plan, schedule_of, verify_plan
from planner.plan.kept_pins import broken_pins
from planner.session import session_of

NVLINK = load_cluster("a100-8-nvlink")
SLOW_LINKS = NVLINK.model_copy(update={"intra_node": NVLINK.intra_node.model_copy(update={"bandwidth": 2e9})})
CASES = {
    "none": ([], []),
    "recompute": ([("transformer.h.1.mlp", "recompute")], []),
    "placed": ([("transformer.h.0.mlp.c_fc.weight", "R")], [("transformer.wte.weight", "S0")]),
}


@cache
def planned(name: str, overlap: bool = True) -> Plan:
    pins, forbidden = CASES[name]
    return api.plan(
        step_reference("gpt2"),
        cluster=SLOW_LINKS,
        mesh=(2,),
        solver="lagrangian",
        workers=1,
        time_limit=8.0,
        overlap=overlap,
        pins=pins,
        forbidden=forbidden,
    )


@pytest.mark.fast_cases("recompute")
@pytest.mark.parametrize("name", ["recompute", "placed"])
def test_pins_are_kept_and_bounded(name):
    plan, session = planned(name), session_of(planned(name), SLOW_LINKS)
    wanted = [Pin(target=t, decision=d, forbids=f > 0) for f, some in enumerate(CASES[name]) for t, d in some]
    assert list(plan.decision.options.pins) == wanted
    assert not list(broken_pins(session.graph, schedule_of(plan, session.graph), wanted))
    verify_plan(
        plan,
        session.graph,
        session.fingerprints,
        seconds=session.instruction_costs,
        allowed=session.allowed_strategies,
    )
    free, serial = planned("none"), planned(name, overlap=False)
    bound = plan.decision.predicted.bound_ns
    assert (bound or 0) <= plan.decision.predicted.objective_ns <= serial.decision.predicted.objective_ns
    # A plan with pins is a plan without them.
    assert (free.decision.predicted.bound_ns or 0) <= plan.decision.predicted.objective_ns
    assert "the bound is over the plans that keep its pins" in plan.record.notes
    if name == "recompute":
        assert plan.recomputed > free.recomputed


def test_pins_that_cannot_be_kept_are_refused():
    with pytest.raises(ExploreError, match=r"nothing is left to transformer\.h\.0"):
        api.plan(
            step_reference("gpt2"),
            cluster=SLOW_LINKS,
            mesh=(2,),
            overlap=True,
            time_limit=2.0,
            pins=[("transformer.h.0.mlp.c_fc.weight", "S0"), ("transformer.h.0.mlp.c_fc.weight", "S1")],
        )
