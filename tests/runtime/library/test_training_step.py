"""Training through ``runtime.load`` on one, two and four ranks against one process of torch alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.processes.library_runs import Trained, train_alone, train_on_rank
from support.steps.planned_steps import plan_of, random_plan, strategy_space
from support.steps.random_schedules import random_offload
from support.tiers import slow

from planner.overlap.buckets import BucketRule
from planner.overlap.serial import SerialSchedule
from planner.overlap.timetable import Room, overlapped
from planner.plan.document import Plan, schedule_of
from planner.schedule.instructions import Offload, Wait, buckets
from planner.scheduling.builder import build_schedule
from planner.session import session_of
from planner.strategies.random_decision import random_decision

alone = cache(train_alone)


def check(found: Trained, expected: Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-4)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.allclose(found.tensors[name], tensor, rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize(
    ("name", "optimizer", "clip_norm"),
    [
        ("gpt2", "adamw", 0.5),
        ("llama", "fused", None),
        ("conv_net", "nesterov", 0.1),
        ("res_net", "adamw", None),
        ("tied_gpt", "foreach", 0.5),
        slow("vit", "rmsprop", None),
        slow("lora_gpt", "adamw", 0.1),
    ],
)
def test_two_ranks_train_like_torch_alone(name, optimizer, clip_norm, two_ranks):
    plan = random_plan(name, (2,), 0)
    expected = alone(name, optimizer, clip_norm)
    assert len({round(loss, 4) for loss in expected.losses}) == 3
    for found in two_ranks.run(train_on_rank, plan, name, optimizer, clip_norm):
        check(Trained(*found), expected)


@pytest.mark.parametrize(("name", "seed"), [slow("gpt2", 0), ("conv_net", 1), slow("llama", 2), slow("res_net", 3)])
def test_two_by_two_ranks_read_their_rows_alone(name, seed, four_ranks):
    plan = random_plan(name, (2, 2), seed)
    for found in four_ranks.run(train_on_rank, plan, name, "adamw", 0.5, "rows"):
        check(Trained(*found), alone(name, "adamw", 0.5))


def overlapped_plan(name: str, mesh: tuple[int, ...], seed: int, span: float = 0.0) -> Plan:
    plan = random_plan(name, mesh, seed)
    session = session_of(plan)
    serial = schedule_of(plan, session.graph)
    room = Room(session.replay(serial).profile.total_during, None)
    beside = overlapped(
        SerialSchedule(session.graph, serial, session.instruction_costs), room, 1.5, rule=BucketRule(span)
    )
    assert any(isinstance(entry, Wait) for entry in beside.instructions)
    assert bool(buckets(beside.instructions)) == bool(span)
    return plan_of(name, beside, session.instruction_costs)


def plan_with_buckets(name: str, mesh: tuple[int, ...], seed: int) -> Plan:
    return overlapped_plan(name, mesh, seed, span=1.0)


def offloading_plan(name: str, mesh: tuple[int, ...], seed: int) -> Plan:
    space = strategy_space(name, mesh)
    schedule, costs = random_offload(name, build_schedule(space, random_decision(space, seed)), seed)
    assert any(isinstance(entry, Offload) for entry in schedule.instructions)
    return plan_of(name, schedule, costs)


@pytest.mark.parametrize(
    ("make", "clip_norm"),
    [(overlapped_plan, None), slow(overlapped_plan, 0.5), (plan_with_buckets, 0.5), (offloading_plan, 0.5)],
    ids=["overlapped", "overlapped-clipped", "buckets", "offloading"],
)
def test_transfers_beside_the_computation(make, clip_norm, two_ranks):
    for found in two_ranks.run(train_on_rank, make("gpt2", (2,), 0), "gpt2", "adamw", clip_norm):
        check(Trained(*found), alone("gpt2", "adamw", clip_norm))
