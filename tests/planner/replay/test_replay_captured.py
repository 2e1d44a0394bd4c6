"""Schedules of a traced GPT-2 with random layouts and recomputation: replayed, damaged, written as plans."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import pytest

from formulations.problem.solution import Status
from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.models.references import ModelReference, load_step, reference_of
from planner.plan.document import (
    Certificate,
    Fingerprints,
    PlannedModel,
    PlanOptions,
    Record,
    load_plan,
    make_plan,
    save_plan,
    schedule_of,
    verify_plan,
)
from planner.replay.checker import OptimizerMemory, replay
from planner.schedule.instructions import Compute, Free, Reshard, Update
from planner.scheduling.builder import build_schedule
from planner.strategies.instruction_costs import InstructionCosts
from planner.strategies.random_decision import random_decision
from planner.strategies.space import build_strategy_space
from planner.strategies.traced_step import trace_step

REFERENCE = ModelReference("hf:gpt2", batch=4, sequence=32, dtype="float32", seed=0, layers=1, dropout=0.1)
CLUSTER = load_cluster("a100-8-nvlink")
ADAMW = OptimizerMemory(optimizer_named("adamw"))


@pytest.fixture(scope="module")
def traced():
    step = load_step(REFERENCE)
    return trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)


@pytest.fixture(scope="module", params=[(2,), (2, 2)], ids=["2", "2x2"])
def planned(request, traced):
    """Graph, schedules of random decisions, and what replays them."""
    costs = CostModel(CLUSTER, request.param)
    space = build_strategy_space(traced, costs, request.param, optimizer_named("adamw"))
    strategies = space.operator_strategies
    allowed = {index: {(s.outputs, s.inputs) for s in found} for index, found in strategies.items()}
    options = {
        "seconds": InstructionCosts(traced.graph, costs, strategies, "adamw"),
        "allowed": allowed.__getitem__,
        "devices": 2 ** len(request.param),
    }
    return traced, [build_schedule(space, random_decision(space, seed)) for seed in range(4)], options


def test_random_schedules_are_correct_steps(planned):
    traced, schedules, options = planned
    for schedule in schedules:
        report = replay(traced.graph, schedule, optimizer=ADAMW, counter_based_random=True, **options)
        assert report.violations == ()
        assert report.total_quanta > 0
        assert sum(tensor.nbytes for tensor in report.alive_at_peak) == report.peak_bytes
        assert report.recomputed > 0


def damaged(schedule, rng):
    """One buffer of one instruction replaced by another; None where the two hold the same."""
    at = rng.randrange(len(schedule.instructions))
    instruction = schedule.instructions[at]
    name = rng.choice(
        {
            Compute: ("inputs", "outputs"),
            Reshard: ("source", "target"),
            Update: ("parameter", "gradient"),
            Free: ("buffers",),
        }[type(instruction)]
    )
    old = getattr(instruction, name)
    new = rng.randrange(len(schedule.buffers))
    position = rng.randrange(len(old)) if isinstance(old, tuple) else 0
    replaced = old[position] if isinstance(old, tuple) else old
    if replaced is None or schedule.buffers[replaced] == schedule.buffers[new]:
        return None
    changed = (*old[:position], new, *old[position + 1 :]) if isinstance(old, tuple) else new
    instructions = list(schedule.instructions)
    instructions[at] = replace(instruction, **{name: changed})
    return replace(schedule, instructions=tuple(instructions))


def test_damage_is_found_in_captured_schedules(planned):
    traced, schedules, options = planned
    rng = random.Random(0)
    tried = 0
    while tried < 60:
        schedule = damaged(rng.choice(schedules), rng)
        if schedule is not None:
            tried += 1
            report = replay(traced.graph, schedule, optimizer=ADAMW, counter_based_random=True, **options)
            assert not report.ok


def test_plan_of_a_captured_step(planned, traced, tmp_path):
    _, schedules, options = planned
    schedule = schedules[0]
    report = replay(traced.graph, schedule, optimizer=ADAMW, counter_based_random=True, **options)
    plan = make_plan(
        traced.graph,
        schedule,
        report,
        model=PlannedModel(**asdict(REFERENCE)),
        options=PlanOptions(
            cluster=CLUSTER.name,
            mesh=schedule.mesh,
            optimizer="adamw",
            formulation="random",
            counter_based_random=True,
            fused=True,
            releases_sources=True,
        ),
        fingerprints=Fingerprints(graph=traced.fingerprint, cluster=CLUSTER.fingerprint(), rules="0" * 64),
        bound_ns=None,
        record=Record(certificate=Certificate(solver="random", status=Status.FEASIBLE, seconds=0.0)),
    )
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    loaded = load_plan(path)
    assert reference_of(loaded.decision.model) == REFERENCE
    assert schedule_of(loaded, traced.graph) == schedule
    checked = verify_plan(loaded, traced.graph, plan.decision.fingerprints, **options)
    assert checked.peak_bytes == plan.peak_bytes
    assert path.stat().st_size / len(schedule.instructions) < 200
