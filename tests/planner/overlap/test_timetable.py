"""Timetables of random plans: correct schedules, within the limit that is asked for, and above every bound."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from support.steps.planned_steps import strategy_space, traced_step
from support.steps.random_schedules import random_timetable
from support.tiers import first, fuzz, slow

from formulations.step.replay import replay_decision
from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import OverlapSpec, load_cluster
from planner.machine.costs import CostModel
from planner.overlap.best import fastest
from planner.overlap.buckets import BucketRule
from planner.overlap.link_costs import with_link_costs
from planner.overlap.multipliers import Multipliers
from planner.overlap.serial import SerialSchedule
from planner.overlap.timetable import Room, overlapped
from planner.overlap.transfers import transfers
from planner.replay.checker import OptimizerMemory, replay
from planner.schedule.instructions import Compute, Reshard, Update, Wait, buckets
from planner.scheduling.builder import build_schedule
from planner.strategies.instruction_costs import InstructionCosts
from planner.strategies.random_decision import random_decision

MEMORY = OptimizerMemory(optimizer_named("adamw"))
NAMES = ("gpt2", "llama", "vit", "mlp", "tied_gpt")
MESHES = ((2,), (4,), (2, 2))


def prices(name, mesh, overlap=None, speed=1.0):
    cluster = load_cluster("a100-8-nvlink")
    link = cluster.intra_node
    cluster = cluster.model_copy(update={"intra_node": link.model_copy(update={"bandwidth": speed * link.bandwidth})})
    if overlap is not None:
        cluster = cluster.model_copy(update={"overlap": overlap})
    costs = CostModel(cluster, mesh)
    return costs, InstructionCosts(
        traced_step(name).graph, costs, strategy_space(name, mesh).operator_strategies, "adamw"
    )


def replayed(name, mesh, schedule, costs):
    allowed = strategy_space(name, mesh).operator_strategies
    return replay(
        traced_step(name).graph,
        schedule,
        optimizer=MEMORY,
        seconds=costs,
        allowed=lambda operator: {(strategy.outputs, strategy.inputs) for strategy in allowed[operator]},
        counter_based_random=True,
    )


@pytest.mark.parametrize("seed", first(1, range(5), 0))
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NAMES)
def test_random_plans(name, mesh, seed):
    space = strategy_space(name, mesh)
    decision = random_decision(space, seed)
    serial = build_schedule(space, decision)
    slower = OverlapSpec(computation=1.3, collectives=1.1) if (seed + len(name) + len(mesh)) % 2 else None
    model_costs, costs = prices(name, mesh, slower)
    before = replayed(name, mesh, serial, costs)
    model = with_link_costs(space, model_costs)
    tally = replay_decision(model, decision).tally
    bounds = [
        Multipliers(model, len(mesh), costs.slowdowns, windows).least(tally) for windows in (1, 6, len(model.nodes))
    ]
    weights = [random_weights(model, len(mesh), costs.slowdowns, 10 * seed + k) for k in range(5)]
    bounds += [tally.weigh(each) // each.scale for each in weights]
    room = Room(before.profile.total_during, before.peak_bytes)
    for eagerness, give_way, span in ((1.0, False, 0.0), (3.0, False, 0.0), (3.0, True, 0.0), (3.0, True, 0.3)):
        schedule = overlapped(
            SerialSchedule(space.graph, serial, costs), room, eagerness, give_way=give_way, rule=BucketRule(span)
        )
        assert not buckets(schedule.instructions) or span
        found = replayed(name, mesh, schedule, costs)
        assert found.ok, found.violations[:3]
        assert max(bounds) <= found.total_quanta
        assert found.recomputed == before.recomputed
        for kind in (Compute, Update):
            assert _count(schedule, kind) == _count(serial, kind)
        beside = [entry for entry in schedule.instructions if isinstance(entry, Reshard) and entry.overlapped]
        assert len(beside) == _count(schedule, Wait)
        assert bool(beside) == bool(transfers(space.graph, serial))
    _, best = fastest(
        space.graph, serial, costs, before.peak_bytes, lambda schedule: replayed(name, mesh, schedule, costs)
    )
    assert best.ok
    assert best.total_quanta <= before.total_quanta
    assert best.peak_bytes <= before.peak_bytes


@pytest.mark.parametrize(
    "numbers", [range(3), slow(range(3, 9)), *(fuzz(range(k, k + 20)) for k in range(0, 2000, 20))]
)
def test_no_choice_of_starts_is_below_the_bound(numbers):
    """A few decisions, links of any speed, and timetables drawn at random beside ours."""
    for number in numbers:
        rng = Random(number)
        name, mesh = rng.choice(("mlp",) * 6 + ("tied_gpt", "gpt2")), rng.choice(((2,), (4,), (2, 2)))
        space = strategy_space(name, mesh)
        slower = OverlapSpec(computation=rng.uniform(1.0, 2.5), collectives=rng.uniform(1.0, 2.5))
        model_costs, costs = prices(name, mesh, rng.choice((None, slower)), 10 ** rng.uniform(-4.0, 1.0))
        model = with_link_costs(space, model_costs)
        weights = [random_weights(model, len(mesh), costs.slowdowns, 7 * number + k) for k in range(4)]
        bounds, best = [None] * len(weights), None
        for seed in range(3):
            decision = random_decision(space, 3 * number + seed)
            tally = replay_decision(model, decision).tally
            found = [tally.weigh(each) // each.scale for each in weights]
            bounds = found if best is None else [min(pair) for pair in zip(bounds, found, strict=True)]
            serial = build_schedule(space, decision)
            room = Room(replayed(name, mesh, serial, costs).profile.total_during, None)
            tables = [
                overlapped(SerialSchedule(space.graph, serial, costs), room, rng.choice((1.0, 3.0, 100.0))),
                serial,
            ]
            tables += [random_timetable(space.graph, serial, rng) for _ in range(4)]
            reports = [replayed(name, mesh, table, costs) for table in tables]
            assert all(report.ok for report in reports), (number, [report.violations[:2] for report in reports])
            least = min(report.total_quanta for report in reports)
            assert max(found) <= least, number
            best = least if best is None else min(best, least)
        assert max(bounds) <= best, number


def random_weights(model, axes, slowdowns, seed):
    """Weights of random shares of the corners of few or many windows."""
    multipliers = Multipliers(model, axes, slowdowns, windows=1 + seed % 9)
    drawn = np.random.default_rng(seed).exponential(size=multipliers.shape) ** 2
    return multipliers.weights(drawn / drawn.sum(axis=1, keepdims=True))


def _count(schedule, kind):
    return sum(isinstance(entry, kind) for entry in schedule.instructions)


def test_slower_streams_take_longer():
    space = strategy_space("gpt2", (2,))
    serial = build_schedule(space, random_decision(space, 0))
    _, plain = prices("gpt2", (2,))
    room = Room(replayed("gpt2", (2,), serial, plain).profile.total_during, None)
    schedule = overlapped(SerialSchedule(space.graph, serial, plain), room)
    times = [
        replayed(
            "gpt2", (2,), schedule, prices("gpt2", (2,), OverlapSpec(computation=own, collectives=other))[1]
        ).total_quanta
        for own, other in ((1.0, 1.0), (1.2, 1.0), (1.2, 1.2), (1.5, 1.2))
    ]
    assert times == sorted(times)
    assert times[0] < times[1]


def test_a_schedule_that_overlaps_is_not_moved_again():
    space = strategy_space("mlp", (2,))
    serial = build_schedule(space, random_decision(space, 0))
    _, costs = prices("mlp", (2,))
    room = Room(replayed("mlp", (2,), serial, costs).profile.total_during, None)
    schedule = overlapped(SerialSchedule(space.graph, serial, costs), room)
    assert not transfers(space.graph, schedule)
    assert replace(schedule) == schedule
