"""CAPTURE on ranks: its plans train as one process does, and local runs are profiled and predicted."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from support.layers.layer_plan_models import layer_names, layer_reference
from support.layers.layer_runs import check_layer_run
from support.processes import rank_pool
from support.tiers import slow

from formulations.capture.problem import stage_configurations
from formulations.capture.sampling import PredictionErrors, prediction_errors
from formulations.galvatron.costs import CostModel
from formulations.layers.layer import LayerChain, tied_layers
from formulations.layers.pipeline_schedule import Schedule
from planner.layers.plan.document import LayerPlan
from planner.layers.profiles.folding import model_layers
from planner.machine.cluster import load_cluster
from planner.papers.galvatron.adapter import device_links
from runtime.figure_7.errors import PREDICTORS, LocalPlans, MeasuredPlan, measured_plans
from runtime.figure_7.runs import LocalRuns
from runtime.job.process_group import LaunchError
from runtime.job.rank_pool import RankPool
from runtime.prediction.local_tables.figure_7_cases import LocalCase, part_of_plans

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


def errors_of(plans: Iterable[MeasuredPlan]) -> dict[str, PredictionErrors]:
    """Errors of every predictor against measured peaks."""
    measured = list(plans)
    held = [each.held for each in measured]
    return {name: prediction_errors([each.predicted[name] for each in measured], held) for name in PREDICTORS}


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


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_random_plans_train_as_one_process_does_on_two_ranks(seeds: range, two_ranks: rank_pool.RankPool) -> None:
    for seed in seeds:
        check_layer_run(two_ranks, random_plan(seed, 2))


@pytest.mark.parametrize("seeds", [slow(SAMPLE_AND_FUZZ[0]), SAMPLE_AND_FUZZ[1]], ids=["sample", "more"])
def test_random_plans_train_as_one_process_does_on_four_ranks(seeds: range, four_ranks: rank_pool.RankPool) -> None:
    for seed in seeds:
        check_layer_run(four_ranks, random_plan(seed, 4))


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
    assert runs.plan((2, 2), [two[0], two[1]], 4).stage_sizes == (1, 2)


def test_random_plans_are_all_different_and_predicted_where_layers_add_up() -> None:
    ran: list[LayerPlan] = []

    def measure(plan: LayerPlan) -> list[int]:
        ran.append(plan)
        sizes = zip(plan.stages, plan.stage_sizes, strict=True)
        return [1000 * len(stage.layers) for stage, size in sizes for _ in range(size)]

    plans = LocalPlans(
        runs=local_runs("deep", Schedule.GPIPE, 4, measure=measure),
        costs=CostModel(device_links(CLUSTER)),
        devices=6,
        degrees=(1, 2),
        micro_batch=8,
    )
    profile = plans.profile()
    ran.clear()
    errors = errors_of(measured_plans(replace(plans, devices=4), profile, 20, 0))
    assert len({plan.model_dump_json() for plan in ran}) == len(ran) == 20
    assert {size for plan in ran for size in plan.stage_sizes} == {1, 2}
    assert not all(plan.is_even for plan in ran)
    ran.clear()
    few = replace(plans, devices=4)
    later = list(measured_plans(few, profile, 6, 0, 4, mixed=True))
    assert len(ran) == 2
    assert [each.layers for each in later] == [each.layers for each in measured_plans(few, profile, 6, 0, mixed=True)][
        4:
    ]
    assert all(max(each.devices) == 2 for each in later)
    for name in ("published", "repaired"):
        assert errors[name].within(1e-12) == (1.0, 1.0)
    assert errors["engine"].per_gpu.shape == (80,)


@pytest.mark.fuzz
def test_ranks_stay_until_one_of_them_fails() -> None:
    with RankPool(2) as pool:
        assert pool.run(abs, -3) == [3, 3]
        assert pool.run(divmod, 7, 2) == [(3, 1), (3, 1)]
        with pytest.raises(LaunchError, match=r"rank \d of 2 failed: (.|\n)*ZeroDivisionError"):
            pool.run(divmod, 1, 0)


@pytest.mark.fuzz
@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
def test_local_runs_are_profiled_and_predicted(schedule: Schedule) -> None:
    """A profile of pipelines of four stages predicts random plans."""
    errors = errors_of(part_of_plans(LocalCase("gpt2", schedule, blocks=6), 0, 6))
    print({name: (found.within(0.05), np.abs(found.per_gpu).max()) for name, found in errors.items()})
    for name in ("repaired", "engine"):
        assert errors[name].within(0.05)[1] == 1.0
        # A stage of embedding or head alone is small, and what it holds for its neighbour is much of it.
        assert np.abs(errors[name].per_gpu).max() < 0.3
