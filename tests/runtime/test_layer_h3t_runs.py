"""From a model's name to ranks: H3T's plans run, and compute what one process computes."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from support import folded_layers
from support.layer_plan_models import layer_reference
from support.layer_runs import check_layer_run

from formulations.models.h3t_operations import SETS, Switch
from planner import layer_planning
from planner.cluster import load_cluster
from planner.layer_h3t import layer_settings
from planner.layer_planning import plan_layers


@pytest.fixture(autouse=True)
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_planning, "model_layers", folded_layers.model_layers)


def planned(name, devices, share=None, *, as_published=False):
    """A plan on devices that reserve nothing, with a share of the memory that a free plan takes, or the free plan."""
    cluster = load_cluster("titan-rtx-8-pcie")
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"reserve_bytes": 0})})
    plan = partial(
        plan_layers,
        layer_reference(name),
        cluster=cluster,
        devices=devices,
        formulation="h3t",
        as_published=as_published,
    )
    free = plan()
    return free if share is None else plan(memory=int(max(free.record.stage_peak_bytes) * share))


@pytest.mark.parametrize(("name", "share"), [("gpt2", None), ("bert", 0.9)])
def test_what_h3t_plans_runs_on_two_ranks(name, share, two_ranks):
    check_layer_run(two_ranks, planned(name, 2, share))


def test_what_h3t_publishes_runs_on_four_ranks(four_ranks):
    check_layer_run(four_ranks, planned("gpt2", 4, as_published=True))


@pytest.mark.parametrize("seed", [0, 1, pytest.param(range(2, 30), marks=pytest.mark.fuzz)])
def test_any_switches_run(seed, two_ranks):

    plan = planned("gpt2", 2)
    for each in seed if isinstance(seed, range) else [seed]:
        drawn = Random(each)
        first, *blocks, last = plan.layers
        blocks = [layer_settings(block.name, Switch(drawn.randrange(SETS)), 2) for block in blocks]
        stage = plan.stages[0].model_copy(update={"layers": (first, *blocks, last)})
        check_layer_run(two_ranks, plan.model_copy(update={"stages": (stage,), "record": None}))
