"""Random layer plans against one process: any settings of any layers must give the same losses and gradients."""

from __future__ import annotations

from dataclasses import astuple
from itertools import pairwise

import pytest
from support.layers.layer_peaks import peak_ratios
from support.layers.layer_random import random_layer_plan
from support.layers.layer_runs import check_layer_run
from support.layers.peak_ratios import PROPERTY, PeakRatio, summary
from support.tiers import first

FAMILIES = ("gpt2", "bert", "t5", "vit")
SEEDS = (7, 8, 9)
FUZZED = (*FAMILIES, "llama")
SETTINGS = (
    "undivided",
    "sequence_parallel",
    "checkpoint",
    "offload_hidden",
    "offload_parameters",
    "offload_optimizer",
)


def devices_of(seed: int) -> int:
    return 4 if seed % 2 else 2


def check_random_plan(name, seed, two_ranks, four_ranks, record_property):
    devices = devices_of(seed)
    plan = random_layer_plan(name, devices, seed)
    outcomes = check_layer_run(four_ranks if devices == 4 else two_ranks, plan)
    ratios = peak_ratios(f"{name}, {devices} devices, seed {seed}", name, plan, outcomes)
    record_property(PROPERTY, [astuple(ratio) for ratio in ratios])
    for ratio in ratios:
        assert 0.5 <= ratio.engine <= 2.0, ratio


@pytest.mark.slow_cases("gpt2-7", "bert-7")
@pytest.mark.parametrize("seed", first(1, SEEDS, 1))
@pytest.mark.parametrize("name", first(2, FAMILIES))
def test_random_layer_plans(name, seed, two_ranks, four_ranks, record_property):
    check_random_plan(name, seed, two_ranks, four_ranks, record_property)


def test_the_random_plans_have_pipelines_unlike_neighbours_and_every_setting():
    plans = [random_layer_plan(name, devices_of(seed), seed) for name in FAMILIES for seed in SEEDS]
    layers = [layer for plan in plans for layer in plan.layers]
    unlike = [
        plan
        for plan in plans
        if any(a.data_parallel != b.data_parallel for stage in plan.stages for a, b in pairwise(stage.layers))
    ]
    assert {len(plan.stages) for plan in plans} == {1, 2, 4}
    assert {plan.schedule for plan in plans if len(plan.stages) > 1} == {"gpipe", "1f1b"}
    assert {layer.sharding for layer in layers} == {"none", "zero2", "zero3"}
    assert len(unlike) >= 4
    for setting in SETTINGS:
        assert any(getattr(layer, setting) for layer in layers), setting
    assert any(layer.slices > 1 and layer.sharded_slices for layer in layers)
    assert any(layer.shard_degree not in (None, layer.data_parallel) for layer in layers if layer.sharding != "none")


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(100, 120))
@pytest.mark.parametrize("name", FUZZED)
def test_many_random_layer_plans(name, seed, two_ranks, four_ranks, record_property):
    check_random_plan(name, seed, two_ranks, four_ranks, record_property)


def test_a_summary_names_the_median_and_the_worst():
    ratios = [PeakRatio("a", 0.5, 1.0), PeakRatio("b", 1.0, 0.9), PeakRatio("c", 2.0, 1.2)]
    assert summary(ratios) == [
        "layer plans, measured / predicted peak of 3 stages",
        "  as the papers count: median 1.000, least 0.500 (a), most 2.000 (c)",
        "  with the engine's own: median 1.000, least 0.900 (b), most 1.200 (c)",
    ]
