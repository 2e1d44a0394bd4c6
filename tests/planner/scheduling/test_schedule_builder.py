"""Schedules of random decisions: replayed cleanly, at the model's cost and with the model's peak."""

from __future__ import annotations

import pytest
import torch
from support.steps.planned_steps import step_reference, strategy_space
from support.steps.random_plans import modes_with, with_reruns_twice
from support.tiers import fuzz, slow

from formulations.problem.checker import check
from formulations.step.counting import Counting
from formulations.step.holds import shortest_holds
from formulations.step.kiwi_chain import build_kiwi_chain, encode_kiwi_chain
from formulations.step.replay import replay_decision
from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.models.references import load_step
from planner.replay.checker import OptimizerMemory, replay
from planner.scheduling.builder import build_schedule
from planner.strategies.instruction_costs import InstructionCosts
from planner.strategies.random_decision import random_decision
from planner.strategies.space import build_strategy_space
from planner.strategies.traced_step import trace_step

NAMES = ["gpt2", "llama", "vit", "conv_net", "lora_gpt", "tied_gpt", "res_net", "mixture_of_experts"]


@pytest.mark.fast_cases(*(f"{name}-mesh{2 - 2 * (k % 2)}-adamw" for k, name in enumerate(NAMES)))
@pytest.mark.parametrize("optimizer", ["adamw", fuzz("sgd")])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_random_decisions_replay_as_the_model_says(name, mesh, optimizer):
    space = strategy_space(name, mesh, optimizer)
    check_decisions(space, optimizer, [once(random_decision(space, seed)) for seed in range(4)])


@pytest.mark.parametrize("name", ["gpt2", slow("conv_net"), slow("mixture_of_experts")])
def test_decisions_for_an_optimizer_without_state(name):
    space = strategy_space(name, (4,), "sgd")
    check_decisions(space, "sgd", [once(random_decision(space, seed)) for seed in range(4)])


@pytest.mark.fast_cases("gpt2-mesh0", "vit-mesh0", "lora_gpt-mesh0", "res_net-mesh0")
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_operators_that_run_again_twice_replay_as_the_model_says(name, mesh):
    space = strategy_space(name, mesh, "adamw")
    decisions = [with_reruns_twice(space.model, random_decision(space, seed), seed) for seed in range(3)]
    assert any(len(moments) > 1 for decision in decisions for moments in decision.recomputed.values())
    check_decisions(space, "adamw", [(decision, modes_with(space.model, decision)) for decision in decisions])


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_softmax_over_shared_rows_of_16_bits_holds_more_while_it_runs(mesh):
    step = load_step(step_reference("gpt"))
    step.module.to(torch.bfloat16)
    traced = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)
    costs = CostModel(load_cluster("a100-8-nvlink"), mesh)
    space = build_strategy_space(traced, costs, mesh, optimizer_named("adamw_mixed"))
    loss = next(k for k, node in enumerate(space.model.nodes) if "aten._log_softmax.default" in node.name)
    assert space.model.nodes[loss].workspace_bytes.max() > space.model.nodes[loss].output_bytes.min()
    decisions = [once(random_decision(space, seed)) for seed in range(4)]
    assert check_decisions(space, "adamw_mixed", decisions) > 0


def once(decision):
    """A decision with the modes of a problem that has it and nothing else."""
    return decision, {i: (mode,) for i, mode in decision.recomputed.items()}


def check_decisions(space, optimizer, decisions):
    """Hold decisions with their modes to one cost and one peak; return how many bytes of workspaces they hold."""
    costs = InstructionCosts(
        space.graph, CostModel(load_cluster("a100-8-nvlink"), space.mesh), space.operator_strategies, optimizer
    )
    storages = [(edge.producer, edge.output) for edge in (*space.model.gradients, *space.model.results)]
    workspaces = 0
    for decision, modes in decisions:
        workspaces += sum(
            int(node.workspace_bytes[at])
            for node, at in zip(space.model.nodes, decision.layouts, strict=True)
            if node.workspace_bytes is not None
        )
        report = replay(
            space.graph,
            build_schedule(space, decision),
            optimizer=OptimizerMemory(optimizer_named(optimizer)),
            seconds=costs,
            allowed=lambda op: {(s.outputs, s.inputs) for s in space.operator_strategies[op]},
            counter_based_random=True,
            device="cuda",  # that of the presets
        )
        assert report.violations == ()
        assert report.recomputed == sum(map(len, decision.recomputed.values())) > 0
        executed = replay_decision(space.model, decision)
        assert (executed.cost, executed.peak) == (report.total_quanta, report.peak_bytes)

        for counting in Counting:
            problem = build_kiwi_chain(space.model, modes, counting)
            problem.validate()
            choices = encode_kiwi_chain(space.model, modes, decision)
            claimed = check(problem, shortest_holds(problem, choices))
            assert claimed.violations == ()
            assert claimed.objective == report.total_quanta
            peak = claimed.peaks[0].usage
            match counting:
                case Counting.EXACT:
                    # Gradients that share one storage are counted on the safe side.
                    assert peak == report.peak_bytes or (
                        peak > report.peak_bytes and len(set(storages)) < len(storages)
                    )
                case Counting.OVER:
                    assert peak >= report.peak_bytes
                case Counting.UNDER:
                    assert peak <= report.peak_bytes
    return workspaces
