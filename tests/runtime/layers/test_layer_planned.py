"""From a model's name to ranks: plans of layers as the planner makes them, run and compared with one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from support.layers import folded_layers
from support.layers.folded_layers import small_cluster
from support.layers.layer_plan_models import layer_reference
from support.layers.layer_runs import check_layer_run
from support.tiers import fuzz

from planner.layers import planning as layer_planning
from planner.layers.planning import plan_layers


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_planning, "model_layers", folded_layers.model_layers)


def planned(name: str, formulation: str, devices: int, share: float | None, **more):
    """A plan on devices that reserve nothing, with a share of the memory that a free plan takes, or the free plan."""
    request = {"cluster": small_cluster(), "devices": devices, "formulation": formulation, **more}
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


@pytest.mark.fast_cases("gpt2-galvatron-False", "bert-h3t-False", "gpt2-osdp-True", "bert-capture-False")
@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("formulation", ["osdp", "galvatron", "h3t", "capture"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_what_a_paper_plans_runs_on_four_ranks(name, formulation, as_published, four_ranks):
    """The published search and the exact one, on four devices with a little less memory than the free plan takes."""
    share = None if formulation == "capture" else 0.97
    check_layer_run(four_ranks, planned(name, formulation, 4, share, as_published=as_published))


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


@pytest.mark.parametrize(
    ("name", "layers", "share"),
    [("gpt2", 4, 0.9), fuzz("llama", 3, 0.8), fuzz("bert", 4, 0.9), fuzz("gpt2", 3, 0.7), fuzz("vit", 5, 0.6)],
)
def test_stages_of_different_sizes_that_capture_plans_run(name, layers, share, four_ranks):
    """The fastest plan within the memory has a degree of its own for every stage, and holds what is predicted."""
    reference = replace(layer_reference(name, layers), batch=16)
    request = {"cluster": small_cluster(), "devices": 4, "formulation": "capture", "choices": {"objective": "time"}}
    free = plan_layers(reference, **request)
    plan = plan_layers(reference, memory=int(share * free.peak_bytes), **request)
    assert not plan.is_even
    assert plan.record.objective_seconds >= free.record.objective_seconds
    outcomes = check_layer_run(four_ranks, plan)
    ends = list(accumulate(plan.stage_sizes, initial=0))
    for predicted, (first, end) in zip(plan.record.engine_peaks, pairwise(ends), strict=True):
        measured = max(outcome.peak_bytes for outcome in outcomes[first:end])
        assert 0.8 < measured / predicted.nbytes < 1.3
