"""Explorations that go on from finished plans: they are the same plans, and what-ifs and prices know their pins."""

from __future__ import annotations

from functools import cache

import pytest
from support.layers import folded_layers
from support.steps.planned_steps import step_reference

from planner import api
from planner.layers import planning as layer_planning
from planner.plan.document import Plan

CLUSTER = "a100-8-nvlink"
REQUEST = api.PlanRequest(solver="lagrangian", workers=1, time_limit=10.0)
MLP = "transformer.h.{}.mlp"


@cache
def planned(overlap: bool = False, grad_accum: int = 1, pinned: bool = False) -> Plan:
    return api.plan(
        step_reference("gpt2"),
        cluster=CLUSTER,
        mesh=(2,),
        time_limit=10.0,
        solver="lagrangian",
        workers=1,
        overlap=overlap,
        grad_accum=grad_accum,
        pins=[(MLP.format(1), "recompute")] if pinned else [],
    )


def test_a_finished_plan_is_not_solved_again(tmp_path, monkeypatch):
    plan = planned(pinned=True)
    plan.save(tmp_path / "plan.json")
    loaded = api.load(tmp_path / "plan.json")
    with api.explore_plan(loaded, request=REQUEST) as here:
        monkeypatch.setattr(here.solver, "_solved", None)
        assert here.plan is loaded
        assert [str(pin) for pin in here.pins] == ["transformer.h.1.mlp recompute"]
        assert here.solution.executed.cost == plan.decision.predicted.objective_ns
        assert here.solution.executed.peak == plan.peak_bytes


def test_pins_are_added_to_those_of_the_plan():
    with api.explore_plan(planned(pinned=True), request=REQUEST) as here:
        found = here.with_pins([(MLP.format(0), "recompute")])
        assert [str(pin) for pin in here.pins] == ["transformer.h.1.mlp recompute", "transformer.h.0.mlp recompute"]
        assert set(found.decision.options.pins) == set(here.pins)
        assert found.objective_seconds > planned(pinned=True).objective_seconds


def test_a_file_is_explored_and_several_pins_are_one_change(tmp_path):
    path = tmp_path / "plan.json"
    planned().save(path)
    with api.explore_plan(str(path), request=REQUEST) as here:
        change = here.pin_all([(MLP.format(0), "recompute")], [(MLP.format(1), "recompute")], time_limit=5.0)
        assert [str(pin) for pin in change.changed] == [
            "transformer.h.0.mlp recompute",
            "transformer.h.1.mlp not recompute",
        ]
        assert len(here.history) == 1
        assert change.seconds > 0 > change.bytes


def test_what_ifs_and_prices_count_all_micro_batches():
    plan = planned(grad_accum=2)
    assert plan.decision.options.grad_accum == 2
    with api.explore_plan(plan, request=REQUEST) as here:
        found = here.whatif(api.ClusterChange(host_bandwidth=2.0))  # what the plan does not use
        assert found.before is plan
        assert found.same.seconds == plan.objective_seconds
        prices = here.price_of_memory([plan.decision.options.memory_bytes])
        assert prices.limits[0].bound_seconds <= prices.limits[0].plan.objective_seconds
        assert prices.limits[0].bound_seconds == plan.bound_seconds


def test_plans_that_overlap_are_refused_with_the_remedy():
    with pytest.raises(api.ExploreError, match="overlap: what-ifs and prices are of plans without it"):
        api.explore_plan(planned(overlap=True))


def test_plans_of_layers_go_on_too(monkeypatch):
    monkeypatch.setattr(layer_planning, "model_layers", folded_layers.model_layers)
    plan = api.plan(step_reference("gpt2"), cluster=CLUSTER, mesh=(2,), formulation="osdp", time_limit=10.0)
    here = api.explore_plan(plan, request=REQUEST)
    assert here.plan is plan
    found = here.whatif(api.ClusterChange(bandwidth=0.5))
    assert found.before is plan
    assert found.after.bound_seconds >= plan.bound_seconds
    here.with_pins([(here.layers[1], "sharding=none")])
    assert here.plan.record.pins == here.pins
    by_hand = plan.model_copy(update={"record": None})
    with pytest.raises(api.ExploreError, match="it was written by hand"):
        api.explore_plan(by_hand)
