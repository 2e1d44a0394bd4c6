"""From a model's name to ranks: H3T's plans run, and compute what one process computes."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from support.layers import folded_layers
from support.layers.layer_plan_models import layer_reference
from support.layers.layer_runs import check_layer_run

from formulations.h3t.operations import SETS, Switch
from planner.layers import planning as layer_planning
from planner.layers.planning import plan_layers
from planner.machine.cluster import load_cluster
from planner.papers.h3t.adapter import layer_settings

SAMPLE_AND_FUZZ = [range(4), pytest.param(range(4, 34), marks=pytest.mark.fuzz)]


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_planning, "model_layers", folded_layers.model_layers)


def planned(name, devices, share=None):
    """A plan on devices that reserve nothing, with a share of the memory that a free plan takes, or the free plan."""
    cluster = load_cluster("titan-rtx-8-pcie")
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"reserve_bytes": 0})})
    plan = partial(
        plan_layers,
        layer_reference(name),
        cluster=cluster,
        devices=devices,
        formulation="h3t",
    )
    free = plan()
    return free if share is None else plan(memory=int(max(free.record.stage_peak_bytes) * share))


@pytest.mark.slow_cases("bert-0.9")
@pytest.mark.parametrize(("name", "share"), [("gpt2", None), ("bert", 0.9)])
def test_what_h3t_plans_runs_on_two_ranks(name, share, two_ranks):
    check_layer_run(two_ranks, planned(name, 2, share))


def switched(plan, switches):
    """A plan whose blocks have other switches."""
    first, *blocks, last = plan.layers
    blocks = [layer_settings(b.name, each, plan.devices) for b, each in zip(blocks, switches, strict=True)]
    stage = plan.stages[0].model_copy(update={"layers": (first, *blocks, last)})
    return plan.model_copy(update={"stages": (stage,), "record": None})


def check_random_switches(seeds, plan, ranks):
    for seed in seeds:
        drawn = Random(seed)
        check_layer_run(ranks, switched(plan, [Switch(drawn.randrange(SETS)) for _ in plan.layers[1:-1]]))


@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_any_switches_run_on_two_ranks(seeds, two_ranks):
    check_random_switches(seeds, planned("gpt2", 2), two_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_any_switches_run_on_four_ranks(seeds, four_ranks):
    check_random_switches(seeds, planned("gpt2", 4), four_ranks)


def test_what_is_offloaded_leaves_the_devices_account(two_ranks):
    """Hidden states and parameters of all blocks: the measured peak falls, and their bytes are on the host."""
    plan = planned("gpt2", 2)
    kept, hidden, lazy = (
        check_layer_run(two_ranks, switched(plan, [Switch.PARTITION | more] * (len(plan.layers) - 2)))
        for more in (Switch(0), Switch.OFFLOAD_HIDDEN, Switch.LAZY_PREFETCH)
    )
    for rank in range(2):
        assert hidden[rank].peak_bytes < kept[rank].peak_bytes
        assert lazy[rank].peak_bytes < kept[rank].peak_bytes
        # The optimizer's state is on the host in all three.
        assert hidden[rank].host_peak_bytes > kept[rank].host_peak_bytes
        assert lazy[rank].host_peak_bytes > kept[rank].host_peak_bytes
