"""Random layer plans against one process: any settings of any layers must give the same losses and gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.layer_random import random_layer_plan
from support.layer_runs import check_layer_run

FAMILIES = ("gpt2", "bert", "t5", "vit")
SEEDS = (1, 2, 3)
FUZZED = (*FAMILIES, "llama")


def devices_of(seed: int) -> int:
    return 4 if seed % 2 else 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_random_layer_plans(name, seed, two_ranks, four_ranks):
    devices = devices_of(seed)
    check_layer_run(four_ranks if devices == 4 else two_ranks, random_layer_plan(name, devices, seed))


def test_the_random_plans_have_pipelines_and_unlike_neighbours():
    plans = [random_layer_plan(name, devices_of(seed), seed) for name in FAMILIES for seed in SEEDS]
    unlike = [
        plan
        for plan in plans
        if any(a.data_parallel != b.data_parallel for stage in plan.stages for a, b in pairwise(stage.layers))
    ]
    assert {len(plan.stages) for plan in plans} == {1, 2, 4}
    assert {plan.schedule for plan in plans if len(plan.stages) > 1} == {"gpipe", "1f1b"}
    assert len(unlike) >= 4


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FUZZED)
def test_many_random_layer_plans(name, two_ranks, four_ranks):
    for seed in range(100, 120):
        devices = devices_of(seed)
        check_layer_run(four_ranks if devices == 4 else two_ranks, random_layer_plan(name, devices, seed))
