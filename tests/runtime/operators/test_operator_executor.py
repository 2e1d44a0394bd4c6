from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support.steps.models import conv_net, gpt, mlp, res_net
from support.steps.plain_schedule import replicated_schedule
from torch import nn

from planner.graph.operator_graph import ValueRole
from planner.graph.optimizers import optimizer_named
from planner.replay.checker import OptimizerMemory, replay
from planner.schedule.frees import with_frees
from planner.schedule.instructions import Compute, Free, Offload, Prefetch, Reshard, Update
from planner.strategies.traced_step import input_tensors, trace_step
from planner.torch_adapter.local import attention
from planner.torch_adapter.local.collectives import MeshGroups
from planner.torch_adapter.tracing.step_module import step_loss
from runtime.measure.memory_meter import MemoryMeter
from runtime.operators.executor import lower
from runtime.operators.instruction_clock import InstructionClock
from runtime.operators.schedule_lifetimes import ScheduleError, check_schedule

CPU = torch.device("cpu")
ALONE = MeshGroups((1,), (0,), ("",))


@pytest.fixture(scope="module")
def traced_mlp():
    torch.manual_seed(0)
    module, args, kwargs, loss_fn = mlp()
    traced = trace_step(module, args, kwargs, loss_fn)
    return traced, replicated_schedule(traced.graph, (1,)), input_tensors(traced, module, args, kwargs)


@pytest.mark.parametrize("make", [mlp, gpt, conv_net, res_net])
def test_one_rank_is_bit_equal_to_eager_autograd(make):
    torch.manual_seed(0)
    module, args, kwargs, loss_fn = make()
    reference = copy.deepcopy(module)
    traced = trace_step(module, args, kwargs, loss_fn)
    lowered = lower(replicated_schedule(traced.graph, (1,)), traced, ALONE, 0, CPU)
    result = lowered.run(input_tensors(traced, module, args, kwargs))
    loss = step_loss(reference, args, kwargs, loss_fn)
    loss.backward()
    assert torch.equal(result.loss, loss.detach())
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    assert result.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(result.gradients[name], gradient, rtol=1e-5, atol=1e-7)
    buffers = dict(reference.named_buffers())
    assert result.buffer_updates.keys() == buffers.keys()
    for name, updated in result.buffer_updates.items():
        torch.testing.assert_close(updated, buffers[name])


@pytest.mark.parametrize("make", [mlp, gpt, conv_net])
def test_the_measured_peak_is_the_replayed_peak(make):
    module, args, kwargs, loss_fn = make()
    traced = trace_step(module, args, kwargs, loss_fn)
    schedule = replicated_schedule(traced.graph, (1,))
    inputs = [tensor.clone() for tensor in input_tensors(traced, module, args, kwargs)]
    lowered, meter = lower(schedule, traced, ALONE, 0, CPU), MemoryMeter(CPU, inputs)
    with meter.metering():
        lowered.run(inputs)
    report = replay(traced.graph, schedule, optimizer=OptimizerMemory(optimizer_named("sgd")))
    assert report.ok
    assert meter.peak_bytes == report.peak_bytes


def test_only_what_the_schedule_keeps_is_alive_afterwards(traced_mlp):
    traced, schedule, inputs = traced_mlp
    inputs = [tensor.clone() for tensor in inputs]
    lowered = lower(schedule, traced, ALONE, 0, CPU)
    meter = MemoryMeter(CPU, inputs)
    with meter.metering():
        result = lowered.run(inputs)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in result.gradients.values()}
    kept = sum(tensor.nbytes for tensor in inputs) + sum(storages.values()) + result.loss.nbytes
    assert meter.live_bytes == kept


def test_an_input_that_the_schedule_frees_leaves_the_list(traced_mlp):
    traced, schedule, inputs = traced_mlp
    position = next(k for k, v in enumerate(traced.graph.inputs) if traced.graph.values[v].role is ValueRole.INPUT)
    buffer = schedule.inputs[position]
    last = max(at for at, entry in enumerate(schedule.instructions) if buffer in getattr(entry, "inputs", ()))
    instructions = (*schedule.instructions[: last + 1], Free((buffer,)), *schedule.instructions[last + 1 :])
    given = list(inputs)
    lower(replace(schedule, instructions=instructions), traced, ALONE, 0, CPU).run(given)
    assert given[position] is None
    assert all(tensor is not None for k, tensor in enumerate(given) if k != position)


def test_updates_are_listed_in_the_order_of_the_schedule(traced_mlp):
    traced, schedule, _ = traced_mlp
    updates = [entry for entry in schedule.instructions if isinstance(entry, Update)]
    names = [traced.graph.values[schedule.buffers[entry.parameter].value].name for entry in updates]
    found = lower(schedule, traced, ALONE, 0, CPU).end.updated
    assert list(found) == names
    assert sorted(names) == ["0.bias", "0.weight", "2.bias", "2.weight"]


class SharedGradient(nn.Module):
    """Two parameters that are added: their gradients are one value of the graph."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))

    def forward(self, hidden):
        return (hidden + self.first + self.second).square().mean()


def test_two_parameters_with_one_gradient_are_both_updated():
    module, args = SharedGradient(), (torch.randn(4, 8),)
    traced = trace_step(module, args)
    module(*args).backward()
    schedule = replicated_schedule(traced.graph, (1,))
    lowered = lower(schedule, traced, ALONE, 0, CPU)
    gradients = lowered.run(input_tensors(traced, module, args)).gradients
    assert sorted(lowered.end.updated) == ["first", "second"]
    for name, parameter in module.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad)


def test_a_clock_times_every_instruction_and_changes_no_number(traced_mlp):
    traced, schedule, inputs = traced_mlp
    clock = InstructionClock(len(schedule.instructions), CPU)
    timed = lower(schedule, traced, ALONE, 0, CPU, clock)
    plain = lower(schedule, traced, ALONE, 0, CPU).run(list(inputs))
    for _ in range(3):
        clock.begin()
        result = timed.run(list(inputs))
        clock.end()
    times = clock.typical()
    assert len(times) == len(schedule.instructions)
    for taken, entry in zip(times, schedule.instructions, strict=True):
        assert taken > 0 or isinstance(entry, Update)
    assert torch.equal(result.loss, plain.loss)
    assert all(torch.equal(result.gradients[name], plain.gradients[name]) for name in plain.gradients)


def moved(instructions, old, new):
    found = list(instructions)
    found.insert(new, found.pop(old))
    return tuple(found)


def first(instructions, kind, start=0):
    return next(at for at, entry in enumerate(instructions) if at >= start and isinstance(entry, kind))


def freed_late(instructions):
    free = first(instructions, Free)
    return moved(instructions, free, first(instructions, Compute, free) + 1)


def freed_early(instructions):
    free = first(instructions, Free)
    return moved(instructions, free, free - 1)


def never_freed(instructions):
    free = first(instructions, Free)
    return (*instructions[:free], *instructions[free + 1 :])


def computed_twice(instructions):
    compute = first(instructions, Compute)
    return (*instructions[: compute + 1], *instructions[compute:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (freed_late, r"frees buffer \d+ after instruction \d+, but its last use is instruction \d+: free it there"),
        (freed_early, r"reads buffer \d+, which does not exist"),
        (never_freed, r"buffers \[\d+.*\] are never freed and are no results"),
        (computed_twice, r"a second time"),
        (lambda found: (Offload(0, 10**6), Reshard(10**6, 10**6 + 1, (("R",), ("S0",))), *found), "prefetch it"),
        (lambda found: (Prefetch(0, 10**6), *found), r"buffer 0, which was never offloaded"),
        (lambda found: (*found, Offload(0, 10**6)), r"updates come last"),
    ],
)
def test_a_schedule_that_would_run_otherwise_than_counted_is_refused(traced_mlp, damage, message):
    traced, schedule, _ = traced_mlp
    check_schedule(schedule, (1,))
    with pytest.raises(ScheduleError, match=message):
        lower(replace(schedule, instructions=damage(schedule.instructions)), traced, ALONE, 0, CPU)


def test_updates_between_computations_are_refused(traced_mlp):
    traced, schedule, _ = traced_mlp
    found = [entry for entry in schedule.instructions if not isinstance(entry, Free)]
    update = len(found) - 1
    made = next(at for at, entry in enumerate(found) if found[update].gradient in getattr(entry, "outputs", ()))
    assert made + 1 < first(found, Update)
    early = with_frees(list(moved(found, update, made + 1)), {*schedule.inputs, schedule.results[0]})
    with pytest.raises(ScheduleError, match="comes after an update: updates come last"):
        lower(replace(schedule, instructions=early), traced, ALONE, 0, CPU)


def test_another_mesh_is_refused(traced_mlp):
    _, schedule, _ = traced_mlp
    with pytest.raises(ScheduleError, match=r"for mesh \(1,\), the job has mesh \(2, 2\)"):
        check_schedule(schedule, (2, 2))


def test_attention_on_another_device_is_not_the_cpu_kernel(monkeypatch):
    monkeypatch.setattr(attention, "capability_of", lambda device: (9, 0))
    module, args, kwargs, loss_fn = gpt()
    traced = trace_step(module, args, kwargs, loss_fn)
    schedule = replicated_schedule(traced.graph, (1,))
    for device, expected in ((CPU, True), (torch.device("cuda", 0), False)):
        graph = lower(schedule, traced, ALONE, 0, device).module.graph
        called = {str(node.target) for node in graph.nodes}
        assert ("aten._scaled_dot_product_flash_attention_for_cpu.default" in called) == expected
