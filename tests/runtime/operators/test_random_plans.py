"""Random plans against one process: any strategies and any recomputation must give the same gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.processes.rank_steps import groups_of, local_inputs, one_process, step_errors
from support.steps.planned_steps import strategy_space, traced_step
from support.steps.random_plans import peaks_on_the_way, with_reruns_twice
from support.tiers import first, only, slow

from planner.graph.optimizers import optimizer_named
from planner.replay.checker import OptimizerMemory, replay
from planner.schedule.instructions import Compute, Schedule
from planner.scheduling.builder import build_schedule
from planner.strategies.random_decision import random_decision
from runtime.measure.memory_meter import MemoryMeter
from runtime.operators.debug_oracle import compare_with_reference
from runtime.operators.executor import lower

CPU = torch.device("cpu")
FAMILIES = ("gpt2", "llama", "vit", "conv_net")
NO_OPTIMIZER = OptimizerMemory(optimizer_named("sgd"))


def run_on_rank(name, schedule, ignored_rows):
    """Largest errors and the measured peak; where the numbers are wrong, the first wrong operator."""
    traced, groups = traced_step(name), groups_of(schedule.mesh)
    full, loss, expected = one_process(name, ignored_rows)
    lowered = lower(schedule, traced, groups, 0, CPU)
    inputs = local_inputs(full, schedule, groups)
    meter = MemoryMeter(CPU, inputs)
    with meter.metering():
        result = lowered.run(inputs)
    loss_error, *worst = step_errors(name, schedule, groups, result, loss, expected)
    failed = torch.tensor(float(not (worst[0] <= 1e-4 and loss_error <= 1e-5)))
    dist.all_reduce(failed)
    blame = str(compare_with_reference(schedule, traced, groups, full)) if failed else ""
    return loss_error, *worst, meter.peak_bytes, blame


def check_plan(pool, name, mesh, seed, ignored_rows=0, twice=False):
    space = strategy_space(name, mesh)
    decision = random_decision(space, seed)
    if twice:
        decision = with_reruns_twice(space.model, decision, seed)
    schedule = build_schedule(space, decision)
    predicted = replay(space.graph, schedule, optimizer=NO_OPTIMIZER, counter_based_random=True)
    assert predicted.ok
    for loss_error, gradient_error, worst, measured, blame in pool.run(run_on_rank, name, schedule, ignored_rows):
        where = f"{name} on {mesh}, seed {seed}: {blame}"
        assert loss_error <= 1e-5, where
        assert gradient_error <= 1e-4, f"{where}; gradient of {worst}"
        resharding = peaks_on_the_way(space.graph, schedule, predicted)
        assert 0.6 * predicted.peak_bytes <= measured <= predicted.peak_bytes, where
        assert resharding or measured == predicted.peak_bytes, where


@pytest.mark.slow_cases("gpt2-0", "vit-0")
@pytest.mark.parametrize("seed", first(2, range(5), 1))
@pytest.mark.parametrize("name", FAMILIES)
def test_random_plans_on_two_ranks(name, seed, two_ranks):
    check_plan(two_ranks, name, (2,), seed)


@pytest.mark.slow_cases("gpt2-0")
@pytest.mark.parametrize("seed", first(1, range(3), 0))
@pytest.mark.parametrize("name", only(("gpt2", "conv_net"), FAMILIES))
def test_random_plans_on_two_by_two_ranks(name, seed, four_ranks):
    check_plan(four_ranks, name, (2, 2), seed)


@pytest.mark.parametrize(("name", "seed"), [("gpt2", 0), slow("llama", 0), slow("vit", 0), ("conv_net", 1)])
def test_operators_that_run_again_twice(name, seed, two_ranks):
    space = strategy_space(name, (2,))
    reruns = with_reruns_twice(space.model, random_decision(space, seed), seed).recomputed
    assert any(len(moments) > 1 for moments in reruns.values())
    check_plan(two_ranks, name, (2,), seed, twice=True)


@pytest.mark.slow_cases("tied_gpt")
@pytest.mark.parametrize("name", [slow("lora_gpt"), "tied_gpt", "rms_net", "res_net", slow("mixture_of_experts")])
def test_frozen_tied_and_normalised_parameters(name, two_ranks, four_ranks):
    check_plan(two_ranks, name, (2,), 0)
    check_plan(four_ranks, name, (2, 2), 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", slow("gpt2")])
def test_labels_that_are_ignored_on_one_rank_only(name, two_ranks, four_ranks):
    for seed in range(2):
        check_plan(two_ranks, name, (2,), seed, ignored_rows=2)
    check_plan(four_ranks, name, (2, 2), 0, ignored_rows=2)


@pytest.mark.parametrize(("name", "mesh"), [slow("llama", (1, 2)), ("gpt2", (2, 1))])
def test_an_axis_of_one_rank_changes_nothing(name, mesh, two_ranks):
    check_plan(two_ranks, name, mesh, 0)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FAMILIES)
def test_many_random_plans(name, two_ranks, four_ranks):
    for seed in range(100, 150):
        check_plan(two_ranks, name, (2,), seed)
    for seed in range(100, 120):
        check_plan(four_ranks, name, (2, 2), seed)


def dropout_run(kept: Schedule, recomputed: Schedule):
    traced, groups = traced_step("dropout_gpt"), groups_of(kept.mesh)
    full, _, _ = one_process("dropout_gpt", 0)
    seed = torch.tensor(5)
    runs = [lower(schedule, traced, groups, seed, CPU) for schedule in (kept, recomputed)]
    first, second = (run.run(local_inputs(full, kept, groups)) for run in runs)
    seed.fill_(6)
    other = runs[0].run(local_inputs(full, kept, groups))
    return (
        torch.equal(first.loss, second.loss),
        all(torch.equal(first.gradients[key], second.gradients[key]) for key in first.gradients),
        torch.equal(first.loss, other.loss),
        compare_with_reference(recomputed, traced, groups, full, seed=5),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(1, range(3)))
def test_dropout_is_bit_equal_when_recomputed_and_the_same_as_in_one_process(seed, two_ranks):
    space = strategy_space("dropout_gpt", (2,))
    decision = random_decision(space, seed, recompute_share=0.9)
    recomputed = build_schedule(space, decision)
    kept = build_schedule(space, replace(decision, recomputed={}))
    reruns = [entry for entry in recomputed.instructions if isinstance(entry, Compute) and entry.recompute]
    assert any(space.graph.operators[rerun.operator].is_random for rerun in reruns)
    for same_loss, same_gradients, other_seed_same, mismatch in two_ranks.run(dropout_run, kept, recomputed):
        assert same_loss
        assert same_gradients
        assert not other_seed_same
        assert mismatch is None


def find_wrong_operator(name, schedule, wrong):
    """Damage one operator's call on every rank and ask the oracle."""
    traced, groups = traced_step(name), groups_of(schedule.mesh)
    full, _, _ = one_process(name, 0)
    return compare_with_reference(wrong, traced, groups, full)


def test_the_oracle_names_the_first_wrong_operator(two_ranks):
    space = strategy_space("gpt", (2,))
    schedule = build_schedule(space, random_decision(space, 1))
    position, swapped = next(
        (at, replace(entry, inputs=entry.inputs[::-1]))
        for at, entry in enumerate(schedule.instructions)
        if isinstance(entry, Compute) and space.graph.operators[entry.operator].target == "aten.gelu_backward.default"
    )
    instructions = list(schedule.instructions)
    instructions[position] = swapped
    wrong = replace(schedule, instructions=tuple(instructions))
    for mismatch in two_ranks.run(find_wrong_operator, "gpt", schedule, wrong):
        assert mismatch.instruction == position
        assert "gelu_backward" in str(mismatch)
        assert mismatch.relative_error > 1e-3
