"""Pins of layers: what they restrict in every formulation, what they cost, and what is refused."""

from __future__ import annotations

from functools import cache

import pytest
from support.layers import folded_layers
from support.layers.folded_layers import small_cluster
from support.steps.planned_steps import step_reference

from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.layers import planning as layer_planning
from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan, LayerSettings
from planner.layers.plan.pins import broken_by, layer_pin
from planner.layers.planning import LAYER_FORMULATIONS, plan_layers
from planner.plan.decision import Pin

BLOCK = "transformer.h.1"
EXCLUSIVE = {
    "osdp": ("sharding=none", "sharding=zero3"),
    "galvatron": ("checkpoint=true", "checkpoint=false"),
    "h3t": ("recompute", "checkpoint=false"),
    "capture": ("tensor_parallel=1", "tensor_parallel=2", "tensor_parallel=4"),
}
"""Decisions of which a layer does exactly one."""

BEYOND = {"galvatron": {"strategies": "all"}, "capture": {"objective": "time"}}


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_planning, "model_layers", folded_layers.model_layers)


@cache
def planned(formulation: str, share: float = 1.0, pins=(), forbidden=(), as_published: bool = False) -> LayerPlan:
    memory = None if share == 1.0 else int(share * max(planned(formulation).record.stage_peak_bytes))
    return plan_layers(
        step_reference("gpt2"),
        cluster=small_cluster(),
        devices=4,
        formulation=formulation,
        memory=memory,
        as_published=as_published,
        pins=pins,
        forbidden=forbidden,
        choices={} if as_published else BEYOND.get(formulation, {}),
    )


@pytest.mark.parametrize("share", [1.0, 0.9])
@pytest.mark.parametrize("formulation", LAYER_FORMULATIONS)
def test_the_best_of_all_decisions_of_a_layer_is_the_best_plan(formulation: str, share: float) -> None:
    """Each pin leaves a part of the plans, and the parts are all of them: the least of their optima is the optimum."""
    target = f"{BLOCK}.attention" if formulation == "osdp" else BLOCK
    free = planned(formulation, share).record
    costs, bounds = [], []
    for decision in EXCLUSIVE[formulation]:
        try:
            plan = planned(formulation, share, ((target, decision),))
        except InfeasibleError:
            continue
        check_layer_plan(plan)
        assert [str(pin) for pin in plan.record.pins] == [f"{target} {decision}"]
        (layer,) = (layer for layer in plan.layers if layer.name == target)
        assert broken_by(plan.record.pins, layer) is None
        costs.append(plan.record.objective_seconds)
        bounds.append(plan.record.bound_seconds)
    tolerance = 2e-3 if formulation == "galvatron" else 1e-9  # which ends at a gap of 0.1 %
    assert min(costs) == pytest.approx(free.objective_seconds, rel=tolerance)
    assert min(bounds) <= free.objective_seconds
    assert free.bound_seconds <= min(costs)


@pytest.mark.parametrize("formulation", LAYER_FORMULATIONS)
def test_what_is_forbidden_is_not_done_by_either_search(formulation: str) -> None:
    for as_published in (False, True):
        free = planned(formulation, as_published=as_published)
        settings = next(layer for layer in free.layers if layer.name.startswith(BLOCK))
        decision = {
            "osdp": f"sharding={settings.sharding}",
            "capture": f"tensor_parallel={settings.tensor_parallel}",
        }.get(formulation, f"checkpoint={str(settings.checkpoint).lower()}")
        plan = planned(formulation, forbidden=((BLOCK, decision),), as_published=as_published)
        check_layer_plan(plan)
        for layer in plan.layers:
            if layer.name.startswith(BLOCK):
                assert broken_by((Pin(target=BLOCK, decision=decision),), layer) is not None


@pytest.mark.parametrize(
    ("formulation", "target", "decision", "message"),
    [
        ("osdp", BLOCK, "tensor_parallel=2", "nothing that osdp may choose for layer transformer.h.1.attention"),
        ("galvatron", BLOCK, "offload", "nothing that galvatron may choose keeps them"),
        ("h3t", "head", "recompute", "nothing that h3t may choose for layer head"),
        ("capture", BLOCK, "sharding=zero3", "nothing that capture may choose keeps them"),
        (
            "h3t",
            "transformer.h.9",
            "keep",
            "names no layer of this step; close to it: 'transformer.h.1'",
        ),
        ("capture", BLOCK, "recompute", "nothing that capture may choose keeps them"),  # only where nothing fits else
        ("h3t", BLOCK, "S0", "decision 'S0' of layer 'transformer.h.1' is unknown: write keep, recompute, offload"),
        ("h3t", BLOCK, "checkpoint", "has no value: write one"),
    ],
)
def test_what_no_plan_can_keep_is_refused_by_name(formulation: str, target: str, decision: str, message: str) -> None:
    with pytest.raises((PlanError, InfeasibleError), match=message):
        planned(formulation, pins=((target, decision),))


def test_the_checker_finds_a_layer_that_does_not_keep_a_pin() -> None:
    plan = planned("h3t", pins=((BLOCK, "recompute"),))
    lying = plan.record.model_copy(update={"pins": (Pin(target=BLOCK, decision="keep"),)})
    with pytest.raises(PlanError, match=r"layer transformer.h.1 does not keep the plan's pin 'transformer.h.1 keep'"):
        check_layer_plan(plan.model_copy(update={"record": lying}))


def test_a_pin_is_about_layers_in_its_module() -> None:
    names = ["embedding", "h.1.attention", "h.1.mlp", "h.10.mlp"]
    pin = layer_pin("h.1", "recompute", names)
    kept = [LayerSettings(name=name, checkpoint=name != "h.1.mlp") for name in names]
    assert [broken_by((pin,), layer) for layer in kept] == [None, None, pin, None]
    assert broken_by((layer_pin("*.mlp", "keep", names, True),), kept[3]) is None
