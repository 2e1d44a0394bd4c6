"""CAPTURE on ranks: its plans train as one process does, and local runs are profiled and predicted."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.layer_plan_models import layer_names, layer_reference
from support.layer_runs import check_layer_run, training_of
from support.rank_pool import RankPool

from formulations.layers import LayerChain, tied_layers
from formulations.models.capture import stage_configurations
from formulations.models.galvatron_costs import CostModel
from formulations.models.pipeline_schedule import Schedule
from formulations.searches.capture_predictor import profile_layers
from planner.cluster import load_cluster
from planner.layer_folding import model_layers
from planner.layer_galvatron import device_links
from planner.layer_plan import LayerPlan
from planner.models import load_step
from planner.plan_error import PlanError
from planner.torch_adapter.resized_storages import ResizedStorageMeter
from runtime.capture_runs import LocalRuns, errors_of_predictions
from runtime.layer_reference import model_reference
from runtime.memory_meter import MemoryMeter

CLUSTER = load_cluster("titan-rtx-8-pcie")
SAMPLE_AND_FUZZ = [range(4), pytest.param(range(4, 34), marks=pytest.mark.fuzz)]


@cache
def chain_of(name: str) -> LayerChain:
    chain = model_layers(layer_reference(name), CLUSTER)
    assert tuple(layer.name for layer in chain.layers) == layer_names(layer_reference(name))
    return chain


def local_runs(name: str, schedule: Schedule, micro_batches: int, **more) -> LocalRuns:
    chain = chain_of(name)
    return LocalRuns(
        chain=chain,
        borders=tuple(range(len(chain) + 1)),
        schedule=schedule,
        micro_batches=micro_batches,
        reference=layer_reference(name),
        **more,
    )


def random_plan(seed: int, devices: int) -> LayerPlan:
    """Random cut and kinds of stages with one degree, tied layers alike, as CAPTURE may plan them."""
    rng = random.Random(seed)
    schedule = rng.choice([Schedule.GPIPE, Schedule.ONE_F_ONE_B])
    runs = local_runs(rng.choice(["gpt2", "vit", "deep"]), schedule, 4)
    degree = rng.choice([degree for degree in (1, 2, 4) if degree <= devices and devices // degree <= runs.layers])
    stages = devices // degree
    cuts = [0, *sorted(rng.sample(range(1, runs.layers), stages - 1)), runs.layers]
    kinds = stage_configurations((degree,))
    chosen = [rng.choice(kinds) for _ in range(stages)]
    if tied_layers(runs.chain):
        chosen[-1] = chosen[0]
    return runs.plan([b - a for a, b in pairwise(cuts)], chosen, degree * rng.choice([1, 2]))


@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_random_plans_train_as_one_process_does_on_two_ranks(seeds: range, two_ranks: RankPool) -> None:
    for seed in seeds:
        check_layer_run(two_ranks, random_plan(seed, 2))


@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_random_plans_train_as_one_process_does_on_four_ranks(seeds: range, four_ranks: RankPool) -> None:
    for seed in seeds:
        check_layer_run(four_ranks, random_plan(seed, 4))


def peak_on_rank(text: str) -> int:
    """Measured peak of two steps of a plan; called on every rank."""
    plan = LayerPlan.model_validate_json(text)
    step = load_step(model_reference(plan), "cpu")
    state = dict([*step.module.named_parameters(), *step.module.named_buffers()])
    training = training_of(plan, {name: tensor.detach() for name, tensor in state.items()}, step.example_kwargs)
    meter = MemoryMeter(torch.device("cpu"), training.resident_tensors(), ResizedStorageMeter())
    for _ in range(2):
        training.step(step.example_kwargs, meter)
    return meter.peak_bytes


def test_a_plan_of_runs_is_what_was_asked_for() -> None:
    given = []

    def measure(plan: LayerPlan) -> list[int]:
        given.append(plan)
        return [10, 11, 20, 19]

    runs = local_runs("gpt2", Schedule.GPIPE, 3, measure=measure)
    two = stage_configurations((1, 2))
    assert runs.run((1, 3), two[2], 4) == (11, 20)
    (plan,) = given
    assert (plan.model.batch, plan.micro_batches, plan.devices) == (12, 3, 4)
    assert [len(stage.layers) for stage in plan.stages] == [1, 3]
    assert [layer.undivided for layer in plan.layers] == [True, False, False, True]
    merged = runs.merged((0, 1, 3, 4))
    assert [len(stage.layers) for stage in merged.plan((1, 1, 1), [two[0]] * 3, 1).stages] == [1, 2, 1]
    with pytest.raises(PlanError, match="3 devices cannot be shared equally by 2 stages"):
        runs.plan((2, 2), [two[0], two[1]], 4)


@pytest.mark.fuzz
@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
def test_local_runs_are_profiled_and_predicted(schedule: Schedule) -> None:
    """A profile of pipelines of three stages predicts random plans."""
    pools = {devices: RankPool(devices) for devices in (3, 4)}
    runs = local_runs(
        "deep", schedule, 4, measure=lambda plan: pools[plan.devices].run(peak_on_rank, plan.model_dump_json())
    )
    try:
        profile = profile_layers(runs, 3, 16, [1])
        assert profile.system.name == "local runs"
        errors = errors_of_predictions(runs, profile, CostModel(device_links(CLUSTER)), 4, 1, 16, 6, 0)
    finally:
        for pool in pools.values():
            pool.close()
    print({name: (found.within(0.05), np.abs(found.per_gpu).max()) for name, found in errors.items()})
    for name in ("repaired", "engine"):
        assert errors[name].within(0.05)[1] == 1.0
        # A stage of embedding or head alone is small, and what it holds for its neighbour is much of it.
        assert np.abs(errors[name].per_gpu).max() < 0.3
