"""Which transfers share their collectives: all of them once, alike, within the span, and never at a loss."""

from __future__ import annotations

import numpy as np
import pytest
from support.steps.planned_steps import strategy_space, traced_step
from support.tiers import slow

from planner.graph.placement import is_shard
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.machine.resharding import BUCKETED, step_between
from planner.overlap.buckets import BucketRule, Grouping
from planner.overlap.transfers import transfers
from planner.replay.clocks import instruction_quanta
from planner.scheduling.builder import build_schedule
from planner.strategies.instruction_costs import InstructionCosts
from planner.strategies.random_decision import random_decision


def grouping(name, mesh, seed):
    """The grouping of a random plan, its transfers, and the time of the computation by position."""
    space, graph = strategy_space(name, mesh), traced_step(name).graph
    costs = InstructionCosts(graph, CostModel(load_cluster("a100-8-nvlink"), mesh), space.operator_strategies, "adamw")
    schedule = build_schedule(space, random_decision(space, seed))
    own = [instruction_quanta(graph, schedule, costs, entry) for entry in schedule.instructions]
    begins = np.concatenate(([0], np.cumsum(own)))
    every = transfers(graph, schedule)
    return Grouping(graph, schedule, costs, every, lambda at: int(begins[at])), every, begins


@pytest.mark.parametrize("rule", [BucketRule(0.05), BucketRule(1.0), BucketRule(0.3, 0.2), BucketRule(1.0, 0.0)])
@pytest.mark.parametrize(("name", "mesh"), [("gpt2", (2,)), slow("llama", (4,)), slow("vit", (2, 2))])
def test_buckets_of_random_plans(name, mesh, rule):
    made, every, begins = grouping(name, mesh, seed=1)
    buckets = made.of(rule, int(begins[-1]))
    together = sorted(transfer.reshard for bucket in buckets for transfer in bucket.transfers)
    assert together == sorted(transfer.reshard for transfer in every)
    for bucket in buckets:
        times = [begins[each.needed if each.is_gather else each.reshard] for each in bucket.transfers]
        assert max(times) - min(times) <= rule.span * begins[-1]
        assert len({transfer.is_gather for transfer in bucket.transfers}) == 1
        for step in bucket.steps:
            assert len(step.parts) == len(bucket.transfers)
            assert [part.joined for part in step.parts] == [False] + [True] * (len(step.parts) - 1)
            if len(step.parts) > 1:
                assert len({kind(part) for part in step.parts}) == 1
        if len(bucket.transfers) > 1:
            alone = {single.transfers[0]: single.cost(rule.exposed) for single in made.of(BucketRule(0.0), 0)}
            apart = sum(alone[transfer] for transfer in bucket.transfers)
            assert bucket.cost(rule.exposed) < apart
    if rule.exposed == 0.0:
        assert len(buckets) == len(every), "copies alone are a loss"


def kind(part):
    step = step_between(*part.path)
    assert step.collective in BUCKETED
    old = part.path[0][step.axis]
    return step.axis, step.collective, "S" if is_shard(old) else old


def test_a_wide_span_takes_several_transfers_together():
    made, every, begins = grouping("gpt2", (2,), seed=0)
    counts = [len(made.of(BucketRule(span), int(begins[-1]))) for span in (0.0, 1.0)]
    assert counts[0] == len(every)
    assert counts[1] < len(every)
