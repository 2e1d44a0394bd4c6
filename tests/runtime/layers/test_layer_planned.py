"""From a model's name to ranks: plans of layers as the planner makes them, run and compared with one process."""

from __future__ import annotations

import pytest
from support.layers import folded_layers
from support.layers.layer_plan_models import layer_reference
from support.layers.layer_runs import check_layer_run
from support.tiers import fuzz

from planner.layers import planning as layer_planning
from planner.layers.planning import plan_layers
from planner.machine.cluster import load_cluster


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_planning, "model_layers", folded_layers.model_layers)


def planned(name: str, formulation: str, devices: int, share: float | None, **more):
    """A plan on devices that reserve nothing, with a share of the memory that a free plan takes, or the free plan."""
    cluster = load_cluster("titan-rtx-8-pcie")
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"reserve_bytes": 0})})
    request = {"cluster": cluster, "devices": devices, "formulation": formulation, **more}
    free = plan_layers(layer_reference(name), **request)
    if share is None:
        return free
    memory = int(max(free.record.stage_peak_bytes) * share)
    return plan_layers(layer_reference(name), memory=memory, **request)


@pytest.mark.slow_cases("vit-0.5", "bert-0.6")
@pytest.mark.parametrize(("name", "share"), [("gpt2", 0.95), ("vit", 0.5), fuzz("t5", 0.4), ("bert", 0.6)])
def test_what_osdp_plans_runs(name, share, two_ranks):
    plan = planned(name, "osdp", 2, share, choices={"memory_model": "engine", "strategies": "all"})
    assert "zero3" in {layer.sharding for layer in plan.layers}
    check_layer_run(two_ranks, plan)


@pytest.mark.fast_cases("gpt2-False", "bert-True")
@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_what_galvatron_plans_runs(name, as_published, four_ranks):
    check_layer_run(four_ranks, planned(name, "galvatron", 4, 0.9, as_published=as_published))


def test_layers_that_nothing_divides_run_whole_beside_divided_ones(two_ranks):
    plan = planned("gpt2", "galvatron", 2, None)
    divided = {"tensor_parallel": 2, "data_parallel": 1, "sharding": "none", "shard_degree": None}
    ends = ("embedding", "head")
    layers = [
        layer.model_copy(update={**divided, "undivided": layer.name in ends})
        for stage in plan.stages
        for layer in stage.layers
    ]
    whole = plan.stages[0].model_copy(update={"layers": tuple(layers)})
    check_layer_run(two_ranks, plan.model_copy(update={"stages": (whole,), "micro_batches": 1}))
