"""Decisions with random layouts, chains and offloads on traced models: their schedules replay as the problem says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.steps.planned_steps import strategy_space, traced_step

from formulations.problem.checker import check
from formulations.step.counting import Counting
from formulations.step.offload.builder import HOST
from formulations.step.offload.model import OffloadProblem, build_offload
from formulations.step.offload.modes import offload_candidates
from formulations.step.sharding import MEMORY
from formulations.step.training_step import StepDecision
from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import LinkSpec, load_cluster
from planner.machine.costs import CostModel
from planner.replay.checker import OptimizerMemory, ReplayReport, replay
from planner.schedule.instructions import Schedule
from planner.scheduling.builder import build_schedule
from planner.scheduling.offload_limit import DeviceLimit
from planner.scheduling.offload_model import links_of, offload_schedule, with_transfer_costs
from planner.strategies.instruction_costs import InstructionCosts
from planner.strategies.random_decision import random_decision

ADAMW = OptimizerMemory(optimizer_named("adamw"))


def random_link(rng: random.Random) -> LinkSpec:
    return LinkSpec(latency_seconds=rng.choice([0.0, 1e-7, 1e-6]), bandwidth=rng.choice([1e8, 1e9, 1e10, 1e12]))


def with_random_offloads(problem: OffloadProblem, decision: StepDecision, rng: random.Random) -> StepDecision:
    """Offload about half of what is not recomputed."""
    candidates = sorted(offload_candidates(problem.model))
    return replace(
        decision,
        offloaded=frozenset(i for i in candidates if i not in decision.recomputed and rng.random() < 0.5),
    )


def check_decision(name: str, mesh: tuple[int, ...], seed: int) -> int:
    """Compare one random decision with the replay of its schedule; return how many operators it offloads."""
    rng = random.Random(seed)
    cluster = load_cluster("a100-8-nvlink").model_copy(
        update={"host_link": random_link(rng), "host_link_shared": rng.random() < 0.3}
    )
    space, cost_model = strategy_space(name, mesh), CostModel(cluster, mesh)
    costs = InstructionCosts(traced_step(name).graph, cost_model, space.operator_strategies, "adamw")
    model = with_transfer_costs(space.model, costs.copy_quanta)
    decision = random_decision(space, seed, recompute_share=rng.choice([0.1, 0.4]))
    modes = {node: (mode,) for node, mode in decision.recomputed.items()}
    problem = build_offload(model, modes, links_of(cost_model, None), Counting.OVER)
    decision = with_random_offloads(problem, decision, rng)
    counted = check(problem.problem, problem.complete(problem.problem, problem.encode(decision)))
    assert not counted.violations

    plain = build_schedule(space, decision)

    def replayed(schedule: Schedule) -> ReplayReport:
        return replay(
            space.graph,
            schedule,
            optimizer=ADAMW,
            seconds=costs,
            allowed=lambda op: {(s.outputs, s.inputs) for s in space.operator_strategies[op]},
            counter_based_random=True,
        )

    before = replayed(plain)
    room = DeviceLimit(before.profile.total_during, counted.peaks[MEMORY].usage)
    after = replayed(offload_schedule(space, decision, plain, costs, room))
    assert after.violations == ()
    assert after.peak_bytes <= min(before.peak_bytes, counted.peaks[MEMORY].usage)
    assert after.host.peak_bytes <= counted.peaks[HOST].usage
    assert after.total_quanta == before.total_quanta + after.stall_quanta
    assert before.total_quanta <= counted.objective
    return len(decision.offloaded)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_random_decisions_that_offload_replay_within_what_the_problem_counts(name, mesh):
    assert min(check_decision(name, mesh, seed) for seed in range(4)) > 0


@pytest.mark.fuzz
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "lora_gpt", "conv_net", "res_net", "mixture_of_experts"])
def test_many_random_decisions_that_offload(name, mesh):
    for seed in range(100, 160):
        check_decision(name, mesh, seed)
