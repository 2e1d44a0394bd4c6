"""Galvatron-BMW's plans of a real model: they run as they are, tied layers are alike, and notes say what differs."""

from __future__ import annotations

from functools import cache

import pytest
from support.layers import folded_layers
from support.steps.planned_steps import step_reference

from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.layers import planning as layer_planning
from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan
from planner.layers.planning import plan_layers
from planner.machine.cluster import ClusterSpec, load_cluster
from planner.papers.galvatron.adapter import GAP

SHARES = (1.0, 0.8, 0.6)
"""Parts of the memory that a free plan takes."""


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_planning, "model_layers", folded_layers.model_layers)


@cache
def cluster(nodes: int = 2, devices_per_node: int = 2) -> ClusterSpec:
    """Nodes with a slow link between, whose devices reserve nothing."""
    titan = load_cluster("titan-rtx-2x8-pcie")
    device = titan.device.model_copy(update={"reserve_bytes": 0})
    return titan.model_copy(update={"device": device, "nodes": nodes, "devices_per_node": devices_per_node})


@cache
def planned(share: float, as_published: bool) -> LayerPlan | None:
    """A plan with a share of the memory of the free exact one; None where the search finds none."""
    request = {"cluster": cluster(), "devices": 4, "formulation": "galvatron"}
    memory = None
    if share < 1:
        memory = int(share * max(planned(1.0, False).record.stage_peak_bytes))
    try:
        return plan_layers(step_reference("gpt2"), **request, memory=memory, as_published=as_published)
    except InfeasibleError:
        return None


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("share", SHARES)
def test_every_plan_runs_as_it_is(share: float, as_published: bool) -> None:
    plan = planned(share, as_published)
    if plan is None:
        assert share < 1
        return
    check_layer_plan(plan)
    first, *_, last = plan.layers
    assert first.model_copy(update={"name": "head"}) == last
    assert max(plan.record.stage_peak_bytes) <= plan.record.tensor_bytes
    assert plan.schedule == ("1f1b" if plan.micro_batches >= len(plan.stages) else "gpipe")


@pytest.mark.parametrize("share", SHARES)
def test_the_published_plan_costs_no_less_than_the_bound(share: float) -> None:
    exact, published = planned(share, False), planned(share, True)
    assert exact is not None
    assert exact.record.gap <= float(GAP)
    if published is not None:
        assert exact.record.bound_seconds <= published.record.objective_seconds


def test_a_unit_below_the_papers_is_noted() -> None:
    tight = next(plan for plan in (planned(share, True) for share in SHARES[1:]) if plan is not None)
    assert any("memory is counted in units of" in note for note in tight.record.notes)
    assert not any("memory is counted in units of" in note for note in planned(1.0, True).record.notes)
    assert all("nest" not in note for note in planned(1.0, False).record.notes)


def test_nothing_that_fits_is_said_to_be_proven() -> None:
    request = {"cluster": cluster(), "devices": 4, "formulation": "galvatron", "memory": 1000}
    with pytest.raises(InfeasibleError, match="proven"):
        plan_layers(step_reference("gpt2"), **request)
    with pytest.raises(InfeasibleError, match="the published search finds no plan"):
        plan_layers(step_reference("gpt2"), **request, as_published=True)


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("devices", [3, 6, 12])
def test_devices_may_be_any_number(devices: int, as_published: bool) -> None:
    request = {"cluster": cluster(3, 4), "devices": devices, "formulation": "galvatron"}
    plan = plan_layers(step_reference("gpt2"), **request, as_published=as_published)
    assert plan.devices == devices
    check_layer_plan(plan)


def test_what_nothing_divides_is_not_blamed_on_memory() -> None:
    """Four layers are four stages at most, and four heads share a layer of 32 devices in parts of four."""
    request = {"cluster": cluster(32, 4), "formulation": "galvatron", "choices": {"micro_batches": "all"}}
    with pytest.raises(PlanError, match=r"batch 4 on 128 devices: .* use a multiple of 128, .* or fewer devices"):
        plan_layers(step_reference("gpt2"), devices=128, **request)
    assert plan_layers(step_reference("gpt2"), devices=64, **request).devices == 64
