"""Gradients of 16-bit parameters are summed over devices in 32 bits, and memory is measured as predicted."""

from __future__ import annotations

import pytest
import torch
from support.processes.rank_steps import groups_of, local_inputs
from support.steps.planned_steps import real_step, step_reference, strategy_space, traced_step
from support.steps.random_plans import peaks_on_the_way
from support.tiers import first
from torch import nn

from planner.graph.operator_graph import HALF
from planner.graph.optimizers import optimizer_named
from planner.graph.view_chains import view_chains
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.replay.checker import OptimizerMemory, replay
from planner.schedule.instructions import Reshard
from planner.scheduling.builder import build_schedule
from planner.session import PlanningSession
from planner.strategies.random_decision import random_decision
from planner.strategies.space import build_strategy_space
from planner.strategies.traced_step import input_tensors, trace_step
from planner.torch_adapter.tracing.step_module import step_loss
from runtime.measure.local_shards import local_block
from runtime.measure.memory_meter import MemoryMeter
from runtime.operators.executor import lower

CPU = torch.device("cpu")
SGD = OptimizerMemory(optimizer_named("sgd"))
ROWS = [256.0, 1.0, 1.0, 1.0]
"""Gradients of the four samples. In 8 bits of mantissa 256 + 1 is 256 again, so a sum in 16 bits is not 259."""


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 8))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return (self.weight.expand(len(samples), 8) * samples).float().sum()


def weighted_step(reduce_dtype):
    module, samples = Weighted().bfloat16(), torch.tensor(ROWS).bfloat16().unsqueeze(1).expand(4, 8).contiguous()
    return module, samples, trace_step(module, (samples,), {}, None, reduce_dtype)


def sums_over_ranks(reduce_dtype, schedule):
    module, samples, traced = weighted_step(reduce_dtype)
    groups = groups_of(schedule.mesh)
    inputs = local_inputs(input_tensors(traced, module, (samples,)), schedule, groups)
    (gradient,) = lower(schedule, traced, groups, 0, CPU).run(inputs).gradients.values()
    return gradient.dtype, gradient.unique().tolist()


def test_small_summands_of_other_ranks_are_not_lost(four_ranks):
    found = {}
    for reduce_dtype in ("float32", "same"):
        _, _, traced = weighted_step(reduce_dtype)
        space = build_strategy_space(
            traced, CostModel(load_cluster("a100-8-nvlink"), (4,)), (4,), optimizer_named("sgd")
        )
        (gradient,) = (o.value for o in traced.graph.outputs if o.of is not None)
        for seed in range(40):
            schedule = build_schedule(space, random_decision(space, seed))
            sums = [
                entry
                for entry in schedule.instructions
                if isinstance(entry, Reshard)
                and "Psum" in entry.path[0]
                and view_chains(traced.graph)[gradient].base == schedule.buffers[entry.source].value
            ]
            if sums:
                found[reduce_dtype] = four_ranks.run(sums_over_ranks, reduce_dtype, schedule)
                break
    assert all(dtype == torch.float32 for dtype, _ in found["float32"])
    assert all(values == [259.0] for _, values in found["float32"])
    assert all(dtype == torch.bfloat16 for dtype, _ in found["same"])


def run_half(name, schedule):
    """Squared errors of this rank's gradients and of those of one process, from one process in 32 bits; the peak."""
    traced, groups, step = traced_step(name), groups_of(schedule.mesh), real_step(name)
    full = input_tensors(traced, step.module, step.example_args, step.example_kwargs)
    inputs = local_inputs(full, schedule, groups)
    expected = []
    for module in (real_step(name).module, real_step(name).module.float()):
        step_loss(module, step.example_args, dict(step.example_kwargs), step.loss_fn).backward()
        expected.append({key: p.grad.double() for key, p in module.named_parameters() if p.grad is not None})
    alone, exact = expected
    meter = MemoryMeter(CPU, inputs)
    with meter.metering():
        result = lower(schedule, traced, groups, 0, CPU).run(inputs)
    mine = theirs = 0.0
    for value, buffer in zip(traced.graph.inputs, schedule.inputs, strict=True):
        key = traced.graph.values[value].name
        if key in exact:
            placement = schedule.buffers[buffer].placement
            one, true = (
                local_block(tensor, placement, groups.shape, groups.coordinate) for tensor in (alone[key], exact[key])
            )
            mine += float((result.gradients[key].double() - true).square().sum())
            theirs += float((one - true).square().sum())
    return mine, theirs, meter.peak_bytes, {str(g.dtype) for g in result.gradients.values()}


def check_half(pool, name, mesh, seed):
    space = strategy_space(name, mesh)
    schedule = build_schedule(space, random_decision(space, seed))
    predicted = replay(space.graph, schedule, optimizer=SGD, counter_based_random=True)
    assert predicted.ok
    assert space.graph.gradient_casts
    for mine, theirs, measured, dtypes in pool.run(run_half, name, schedule):
        assert dtypes == {"torch.float32"}
        assert mine <= 4 * theirs
        resharding = peaks_on_the_way(space.graph, schedule, predicted)
        assert 0.6 * predicted.peak_bytes <= measured <= predicted.peak_bytes
        assert resharding or measured == predicted.peak_bytes


@pytest.mark.slow_cases("llama:bfloat16-0")
@pytest.mark.parametrize("seed", first(1, range(3), 0))
@pytest.mark.parametrize("name", ["gpt2:bfloat16", "llama:bfloat16"])
def test_random_plans_sum_no_gradient_in_16_bits(name, seed, two_ranks, four_ranks):
    check_half(two_ranks, name, (2,), seed)
    check_half(four_ranks, name, (2, 2), seed)


@pytest.mark.parametrize("name", ["gpt2:bfloat16", "llama:float16"])
def test_casts_follow_the_operators_that_make_gradients(name):
    graph = traced_step(name).graph
    readers = {value: op for op in graph.operators for value in op.inputs}
    for index in graph.gradient_casts:
        operator = graph.operators[index]
        source = graph.values[operator.inputs[0]]
        assert source.spec.dtype in HALF
        assert source.producer is not None
        assert not graph.operators[source.producer].is_view
        assert readers[source.index] is operator
    assert {*graph.gradient_dtypes.values()} == {"float32"}
    assert len(graph.gradient_casts) >= len(graph.gradient_dtypes)


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(8, 4))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return ((self.first + self.second.t()) * samples).float().sum()


def test_a_tensor_that_is_the_gradient_of_two_parameters_is_cast_once():
    graph = trace_step(Summed().bfloat16(), (torch.ones(4, 8).bfloat16(),)).graph
    assert {*graph.gradient_dtypes.values()} == {"float32"}
    assert len(graph.gradient_casts) == 1


def test_sessions_on_any_mesh_have_the_same_step():
    one, two = (PlanningSession(step_reference("gpt2:bfloat16"), "a100-8-nvlink", mesh) for mesh in ((1,), (2,)))
    assert one.reference == two.reference
    assert one.traced.fingerprint == two.traced.fingerprint


def test_gradients_stay_as_they_are_where_the_user_says_so():
    for name in ("gpt2:bfloat16:same", "gpt2"):
        graph = traced_step(name).graph
        assert not graph.gradient_casts
        assert {*graph.gradient_dtypes.values()} == {graph.parameters[0].spec.dtype}


def test_no_plan_of_the_space_sums_ahead_of_a_cast():
    space = strategy_space("gpt2:bfloat16", (2, 2))
    checked = 0
    for edge in space.model.edges:
        node = space.nodes[edge.consumer]
        if node.operator in space.graph.gradient_casts:
            for i, before in enumerate(space.strategies[edge.producer]):
                for j, after in enumerate(space.strategies[edge.consumer]):
                    placed, taken = before.outputs[edge.output], after.inputs[0]
                    sums = any(a[0] == "P" and b[0] != "P" for a, b in zip(placed, taken, strict=True))
                    assert not sums or edge.forbidden[i, j]
                    checked += sums
    assert checked > 100
