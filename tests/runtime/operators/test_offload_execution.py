"""Offload on one rank: the same bits, and device and host bytes as the replay counts them."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from support.layers.racing_streams import RacingStreams
from support.steps.models import conv_net, gpt, mlp
from support.steps.offload_case import CopyPrices
from support.steps.plain_schedule import replicated_schedule

from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import HostCopies
from planner.replay.checker import OptimizerMemory, replay
from planner.schedule.instructions import Offload
from planner.scheduling.offload_schedule import offload_candidates, with_offload
from planner.strategies.traced_step import input_tensors, trace_step
from planner.torch_adapter.local.collectives import MeshGroups
from runtime.measure.host_arena import ALIGNMENT, HostArena, HostLifetime, host_lifetimes, plan_arena
from runtime.measure.host_copies import HostCopies as HostCopier
from runtime.measure.memory_meter import MemoryMeter
from runtime.operators import executor
from runtime.operators.executor import lower

CPU = torch.device("cpu")
ALONE = MeshGroups((1,), (0,), ("",))
SGD = OptimizerMemory(optimizer_named("sgd"))


class OneDuration(CopyPrices):
    """Every copy takes as long."""

    def __init__(self, duration, way=HostCopies.BOTH_WAYS):
        super().__init__({}, way)
        self.duration = duration

    def transfer_quanta(self, value, placement, outward):
        return self.duration


def replicated(make):
    """A traced step, its inputs, and the schedule of one rank that keeps everything."""
    torch.manual_seed(0)
    module, args, kwargs, loss_fn = make()
    traced = trace_step(module, args, kwargs, loss_fn)
    return traced, input_tensors(traced, module, args, kwargs), replicated_schedule(traced.graph, (1,))


def run(schedule, traced, inputs):
    inputs = [tensor.clone() for tensor in inputs]
    lowered, meter = lower(schedule, traced, ALONE, 0, CPU), MemoryMeter(CPU, inputs)
    with meter.metering():
        result = lowered.run(inputs)
    return result, meter


@pytest.mark.parametrize("make", [mlp, gpt, conv_net])
def test_bits_and_bytes(make):
    traced, inputs, plain = replicated(make)
    expected, before = run(plain, traced, inputs)
    assert before.host_peak_bytes == 0
    away = offload_candidates(traced.graph, plain)
    for prices in (OneDuration(0), OneDuration(5), OneDuration(40), OneDuration(40, HostCopies.BLOCKING)):
        schedule = with_offload(traced.graph, plain, away, prices)
        result, meter = run(schedule, traced, inputs)
        assert torch.equal(result.loss, expected.loss)
        assert all(torch.equal(result.gradients[key], expected.gradients[key]) for key in expected.gradients)
        report = replay(traced.graph, schedule, optimizer=SGD, seconds=prices)
        assert report.violations == ()
        assert meter.peak_bytes == report.peak_bytes <= before.peak_bytes
        assert meter.host_peak_bytes == report.host.peak_bytes > 0
        assert meter.live_bytes == before.live_bytes


def test_the_device_account_drops_where_activations_fill_it():
    traced, inputs, plain = replicated(gpt)
    schedule = with_offload(traced.graph, plain, offload_candidates(traced.graph, plain), OneDuration(0))
    assert sum(isinstance(entry, Offload) for entry in schedule.instructions) > 20
    _, before = run(plain, traced, inputs)
    _, after = run(schedule, traced, inputs)
    assert after.peak_bytes < 0.7 * before.peak_bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies run beside the computation on a GPU only")
def test_bits_are_the_same_where_copies_run_beside_the_computation():
    traced, inputs, plain = replicated(gpt)
    device = torch.device("cuda", 0)
    inputs = [tensor.to(device) for tensor in inputs]
    expected = lower(plain, traced, ALONE, 0, device).run(list(inputs))
    away = offload_candidates(traced.graph, plain)
    schedule = with_offload(traced.graph, plain, away, OneDuration(5))
    report = replay(traced.graph, schedule, optimizer=SGD)
    lowered = lower(schedule, traced, ALONE, 0, device)
    for _ in range(5):
        meter = MemoryMeter(device, inputs)
        with meter.metering():
            result = lowered.run(list(inputs))
        assert meter.host_peak_bytes == plan_arena(host_lifetimes(traced.graph, schedule)).nbytes
        assert meter.host_peak_bytes >= report.host.peak_bytes
        assert torch.equal(result.loss, expected.loss)
        assert all(torch.equal(result.gradients[key], expected.gradients[key]) for key in expected.gradients)


@pytest.mark.parametrize("make", [mlp, gpt])
def test_bits_are_the_same_out_of_one_block_of_host_memory(make, monkeypatch):
    """As on CUDA, where the block is pinned: places are used again, and no tensor that is needed is overwritten."""
    traced, inputs, plain = replicated(make)
    expected, _ = run(plain, traced, inputs)
    schedule = with_offload(traced.graph, plain, offload_candidates(traced.graph, plain), OneDuration(5))
    lifetimes = host_lifetimes(traced.graph, schedule)
    planned = plan_arena(lifetimes)
    peak = replay(traced.graph, schedule, optimizer=SGD).host.peak_bytes
    assert peak <= planned.nbytes <= 1.1 * peak + ALIGNMENT * len(lifetimes)
    for one, other in combinations(lifetimes, 2):
        first, second = (planned.places[each.buffer] for each in (one, other))
        assert not one.meets(other) or first + one.nbytes <= second or second + other.nbytes <= first
    made = []
    monkeypatch.setattr(executor, "arena_of", lambda *_: made.append(HostArena(planned, pinned=False)) or made[0])
    for _ in range(2):
        result, _ = run(schedule, traced, inputs)
        assert torch.equal(result.loss, expected.loss)
        assert all(torch.equal(result.gradients[key], expected.gradients[key]) for key in expected.gradients)
    assert len(made) == 2


def test_nested_lifetimes_have_no_gaps():
    """As activations are: the first that goes is the last that comes back."""
    lifetimes = [HostLifetime(at, (at % 5 + 1) * ALIGNMENT, at, 100 - at) for at in range(20)]
    assert plan_arena(lifetimes).nbytes == sum(entry.nbytes for entry in lifetimes)
    again = [HostLifetime(100 + at, entry.nbytes, 200 + at, 300 - at) for at, entry in enumerate(lifetimes)]
    assert plan_arena([*lifetimes, *again]).nbytes == plan_arena(lifetimes).nbytes


def test_a_block_is_registered_as_it_is_and_given_back(monkeypatch):
    calls = []
    double = SimpleNamespace(
        cudaHostRegister=lambda *given: calls.append(given) or 0, cudaHostUnregister=lambda *given: calls.append(given)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: double)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: calls.append(code))
    planned = plan_arena([HostLifetime(0, 3 * ALIGNMENT, 0, 1)])
    arena = HostArena(planned, pinned=True)
    like = torch.empty(4, 8, 6).permute(2, 0, 1)
    assert arena.tensor(0, like).stride() == like.stride()
    pointer = arena.tensor(0, like).data_ptr()
    del arena
    assert calls == [(pointer, 3 * ALIGNMENT, 0), 0, (pointer,)]


def test_copies_keep_the_layout_in_memory():
    copies = HostCopier(CPU)
    source = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    host, offloaded = copies.offload(source)
    back, fetched = copies.prefetch(host, offloaded)
    copies.wait(back, fetched)
    assert source.stride() == host.stride() == back.stride()
    assert torch.equal(source, back)
    assert len({tensor.untyped_storage().data_ptr() for tensor in (source, host, back)}) == 3


def fail():
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
def test_streams_and_events_leave_no_race(fails, monkeypatch):
    """On streams that notice what could run at once; a step that fails leaves no copy to memory that is freed."""
    traced, inputs, plain = replicated(mlp)
    expected, _ = run(plain, traced, inputs)
    schedule = with_offload(traced.graph, plain, offload_candidates(traced.graph, plain), OneDuration(5))
    racing, copier = RacingStreams(monkeypatch), HostCopier(CPU)
    copier.overlaps = True
    monkeypatch.setattr(executor, "HostCopies", lambda *_: copier)
    lowered = lower(schedule, traced, ALONE, 0, CPU)
    if fails:
        graph = lowered.module.graph
        *_, last = (node for node in graph.nodes if node.target == copier.prefetch)
        with graph.inserting_after(last):
            graph.call_function(fail)
        lowered.module.recompile()
    with racing, pytest.raises(ZeroDivisionError) if fails else nullcontext():
        result = lowered.run([tensor.clone() for tensor in inputs])
        assert all(torch.equal(result.gradients[key], expected.gradients[key]) for key in expected.gradients)
    gc.collect()
    assert racing.copies > 2
    assert racing.races == []
