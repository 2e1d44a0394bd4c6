"""Meshes of every shape: axes of one rank change nothing, three axes compose rightly."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
from support.steps.planned_steps import strategy_space, traced_step
from support.tiers import slow

from formulations.step.training_step import NodeKind
from planner.graph.optimizers import optimizer_named
from planner.graph.placement import REPLICATE
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.replay.checker import OptimizerMemory, replay
from planner.scheduling.builder import build_schedule
from planner.strategies.instruction_costs import InstructionCosts
from planner.strategies.random_decision import random_decision
from planner.strategies.sharding_rules import axis_rules
from planner.torch_adapter.local.calls import OperatorCall
from planner.torch_adapter.local.context import bind
from planner.torch_adapter.rules.reference_inputs import SmallInstance
from planner.torch_adapter.rules.table import signature
from planner.torch_adapter.rules.verification import reference_of, strategy_failure

CUBE = (2, 2, 2)


def without_axis(placement, axis):
    if placement is None:
        return None
    assert placement[axis] == REPLICATE
    return tuple(word for position, word in enumerate(placement) if position != axis)


def equal_tables(left, right) -> bool:
    """Whether two records hold the same numbers in the same places."""
    return all(
        np.array_equal(getattr(left, field.name), getattr(right, field.name)) for field in fields(left)
    )  # an array may be None, which is equal to None only


@pytest.mark.parametrize(("mesh", "axis"), [((1, 4), 0), ((4, 1), 1), ((1, 4, 1), 2)])
@pytest.mark.parametrize("name", ["gpt2", slow("llama"), "conv_net", slow("mixture_of_experts")])
def test_an_axis_of_one_rank_adds_a_word_and_nothing_else(name, mesh, axis):
    thin, flat = strategy_space(name, mesh), strategy_space(name, mesh[:axis] + mesh[axis + 1 :])
    assert thin.report == flat.report
    for more, less in zip(thin.strategies, flat.strategies, strict=True):
        for of_thin, of_flat in zip(more, less, strict=True):
            assert tuple(without_axis(placement, axis) for placement in of_thin.outputs) == of_flat.outputs
            assert tuple(without_axis(placement, axis) for placement in of_thin.inputs) == of_flat.inputs
            assert [entry[1:] for entry in of_thin.collectives] == [entry[1:] for entry in of_flat.collectives]
    for family in ("nodes", "edges", "gradients", "results"):
        for of_thin, of_flat in zip(getattr(thin.model, family), getattr(flat.model, family), strict=True):
            assert equal_tables(of_thin, of_flat), (family, of_thin)


def test_one_rank_has_one_strategy():
    space = strategy_space("gpt2", (1, 1))
    assert {node.size for node in space.model.nodes} == {1}
    assert space.report.without_rule == space.report.not_dividing == {}


@pytest.mark.parametrize("mesh", [(2, 4), (4, 2), (8,)])
def test_equal_operators_and_edges_share_their_tables(mesh):
    model = strategy_space("llama", mesh).model
    computing = [node for node in model.nodes if node.kind in (NodeKind.FORWARD, NodeKind.BACKWARD)]
    for family, arrays in (
        ("cost", [node.cost for node in computing]),
        ("output bytes", [node.output_bytes for node in computing]),
        ("edge cost", [edge.cost for edge in model.edges]),
        ("forbidden", [edge.forbidden for edge in model.edges]),
    ):
        assert len({id(array) for array in arrays}) < 0.8 * len(arrays), family


def total_of_tables(model, layouts) -> int:
    """Cost of a decision without recomputation, entry by entry from the tables."""
    total = 0
    for node, layout in zip(model.nodes, layouts, strict=True):
        total += int(node.cost[layout])
        if node.update_cost is not None:
            total += int(node.update_cost[layout])
    for edge in model.edges:
        total += int(edge.cost[layouts[edge.producer], layouts[edge.consumer]])
    for gradient in model.gradients:
        total += int(gradient.cost[layouts[gradient.producer], layouts[gradient.parameter]])
    return total + sum(int(result.cost[layouts[result.producer]]) for result in model.results)


@pytest.mark.fast_cases("llama-mesh2", "res_net-mesh7", "mixture_of_experts-mesh8", "gpt2-mesh13")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *product(("llama", "res_net", "mixture_of_experts"), ((1, 4), (4, 1), (2, 4), (4, 2))),
        ("conv_net", CUBE),
        ("gpt2", CUBE),
    ],
)
def test_random_schedules_replay_at_the_cost_of_the_tables(name, mesh):
    space, traced = strategy_space(name, mesh), traced_step(name)
    costs = InstructionCosts(
        traced.graph, CostModel(load_cluster("a100-8-nvlink"), mesh), space.operator_strategies, "adamw"
    )
    allowed = {index: {(s.outputs, s.inputs) for s in found} for index, found in space.operator_strategies.items()}
    for seed in range(2):
        drawn = random_decision(space, seed)
        for decision in (drawn, replace(drawn, recomputed=type(drawn.recomputed)())):
            report = replay(
                traced.graph,
                build_schedule(space, decision),
                optimizer=OptimizerMemory(optimizer_named("adamw")),
                seconds=costs,
                allowed=allowed.__getitem__,
                counter_based_random=True,
            )
            assert report.violations == ()
        assert report.total_quanta == total_of_tables(space.model, drawn.layouts)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        slow("conv_net"),
        *(pytest.param(name, marks=pytest.mark.fuzz) for name in ("llama", "mixture_of_experts")),
    ],
)
def test_strategies_of_three_axes_reproduce_every_operator_on_eight_ranks(name):
    space, step = strategy_space(name, CUBE), traced_step(name)
    chooser, seen = random.Random(name), set()
    for operator, call in zip(step.graph.operators, step.calls, strict=True):
        inputs = tuple(step.graph.values[index].spec for index in operator.inputs)
        outputs = tuple(None if index is None else step.graph.values[index].spec for index in operator.outputs)
        key = signature(call, inputs, outputs)
        if key in seen:
            continue
        seen.add(key)
        reference = real_reference(call, inputs, outputs)
        strategies = space.operator_strategies[operator.index]
        for strategy in chooser.sample(strategies, min(2, len(strategies))):
            failure = strategy_failure(
                reference, strategy.outputs, strategy.inputs, CUBE, collectives=bool(strategy.collectives)
            )
            assert failure is None, (operator.identity, strategy, failure)
    assert len(seen) > 30


def real_reference(call: OperatorCall, inputs, outputs):
    """Reference at the sizes of the step itself."""
    shapes = tuple(None if output is None else output.shape for output in outputs)
    reference = reference_of(SmallInstance(call, bind(call, len(inputs)), inputs, shapes), outputs)
    assert reference is not None, str(call.target)
    return reference


def test_three_axes_offer_every_combination_that_divides():
    space, step = strategy_space("gpt2", CUBE), traced_step("gpt2")
    rules = axis_rules(step, 2)[0]
    for operator in step.graph.operators:
        if operator.target == "aten.mm.default":
            assert len(space.operator_strategies[operator.index]) <= len(rules[operator.index]) ** 3
            placed = {strategy.inputs for strategy in space.operator_strategies[operator.index]}
            mixed = [inputs for inputs in placed if len(set(inputs[0])) == 3]
            assert mixed, "a different word on every axis"
