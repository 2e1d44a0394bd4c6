"""Timing on one rank of kernels and collectives that represent the operators of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor

from planner.graph.operator_classes import memory_passes
from planner.graph.placement import Placement, local_numel, local_shape
from planner.machine.calibration import CollectiveSample, KernelSample, OverlapSample, RankReport
from planner.machine.resharding import step_between, step_copies
from planner.torch_adapter.local.collectives import MeshGroups, reshard_step
from runtime.calibration.device import found_device, host_sample
from runtime.calibration.kernels import WORKLOADS, Kernel, kernels
from runtime.calibration.timing import launch_seconds, time_call, undisturbed, wall_time

COLLECTIVE_WIDTHS = {"cpu": (16, 64, 256, 512, 1024), "cuda": (64, 256, 1024, 4096)}
OVERLAPPED_WORDS = 2**24


def measure_rank(groups: MeshGroups, seconds: float, device: torch.device) -> RankReport:
    """Time everything on this rank, each thing for about ``seconds`` seconds; all ranks must call it.

    Parameters
    ----------
    groups
        Of all ranks: machines, then the ranks of each.
    seconds
        How long each kernel and each collective is timed.
    device
        Of this rank.
    """
    on_device = device.type == "cuda"
    work = WORKLOADS[device.type]
    launching = launch_seconds(seconds, device)
    computing = tuple(_kernel_sample(kernel, seconds, device) for kernel in kernels(work))
    between, inside = (
        tuple(_collective_samples(groups.along(axis), seconds, device)) if ranks > 1 else ()
        for axis, ranks in enumerate(groups.shape)
    )
    return RankReport(
        launch_seconds=launching,
        kernels=computing,
        collectives=inside,
        between=between,
        overlap=None if on_device else _overlap_sample(seconds, work.rows, work.width),
        host=host_sample(device) if on_device else None,
        device=found_device(device) if on_device else None,
    )


def _kernel_sample(kernel: Kernel, seconds: float, device: torch.device) -> KernelSample:
    results = kernel.run()
    outputs = (results,) if isinstance(results, Tensor) else tuple(results)
    reads_all, passes = memory_passes(kernel.kind)
    read = sum(tensor.nbytes for tensor in kernel.inputs if reads_all or not tensor.is_floating_point())
    first = kernel.inputs[0] if kernel.inputs else outputs[0]
    return KernelSample(
        name=kernel.name,
        kind=kernel.kind,
        dtype=str(first.dtype).removeprefix("torch."),
        flops=kernel.flops,
        nbytes=kernel.moved or read + passes * sum(tensor.nbytes for tensor in outputs),
        seconds=time_call(kernel.run, seconds, device),
        key=kernel.key,
    )


def _collective_samples(groups: MeshGroups, seconds: float, device: torch.device) -> Iterator[CollectiveSample]:
    """Steps as the executor runs them, on square tensors of several sizes."""
    ranks = groups.shape[0]
    changes: tuple[tuple[Placement, Placement], ...] = (
        (("Psum",), ("R",)),
        (("S0",), ("R",)),
        (("Psum",), ("S0",)),
        (("S0",), ("S1",)),
    )
    for width in COLLECTIVE_WIDTHS[device.type]:
        shape = (width * ranks, width * ranks)
        for before, after in changes:
            step = step_between(before, after)
            assert step is not None
            assert step.collective is not None
            tensor = torch.ones(local_shape(shape, before, groups.shape), device=device)
            old, new = (4 * local_numel(shape, placement, groups.shape) for placement in (before, after))
            yield CollectiveSample(
                collective=step.collective,
                ranks=ranks,
                nbytes=max(old, new),
                copied_bytes=sum(step_copies(step, old, new)),
                seconds=_agreed_time(partial(reshard_step(before, after, groups), tensor), seconds),
            )


def _overlap_sample(seconds: float, rows: int, width: int) -> OverlapSample:
    """A large all-reduce in a group of its own, and kernels of a layer beside it until it is done."""
    group, tensor = dist.new_group(), torch.zeros(OVERLAPPED_WORDS)
    narrow, weight = torch.randn(rows // 4, width), torch.randn(width, width)

    def compute() -> None:
        hidden = functional.gelu(torch.mm(narrow, weight))
        functional.layer_norm(hidden + narrow, (width,))

    def reduce() -> Tensor:
        dist.all_reduce(tensor, group=group)
        return tensor

    collective_alone = _agreed_time(reduce, seconds)
    dist.barrier()
    computation_alone = wall_time(compute, seconds)
    collectives, computations = [], []
    for _ in range(_agreed_count(collective_alone, seconds)):
        dist.barrier()
        begun, calls = perf_counter(), 0
        flying = dist.all_reduce(tensor, group=group, async_op=True)
        assert flying is not None, "an asynchronous collective has a handle"
        while calls == 0 or not flying.is_completed():
            compute()
            calls += 1
        collectives.append(perf_counter() - begun)
        computations.append(collectives[-1] / calls)
        flying.wait()
    dist.destroy_process_group(group)
    return OverlapSample(
        computation_alone=computation_alone,
        computation_beside=undisturbed(computations),
        collective_alone=collective_alone,
        collective_beside=undisturbed(collectives),
    )


def _agreed_time(call: Callable[[], Tensor], seconds: float) -> float:
    """Seconds of one undisturbed collective; the ranks agree on the number of calls, which avoids a deadlock."""

    def waited() -> None:
        if call().is_cuda:
            torch.cuda.synchronize()

    waited()
    dist.barrier()
    start = perf_counter()
    for _ in range(3):
        waited()
    times = []
    for _ in range(_agreed_count((perf_counter() - start) / 3, seconds)):
        start = perf_counter()
        waited()
        times.append(perf_counter() - start)
    return undisturbed(times)


def _agreed_count(estimate: float, seconds: float) -> int:
    """Calls in so many seconds, each of which takes an estimated time; the same on all ranks."""
    slowest = torch.tensor(estimate)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(3, min(500, int(seconds / float(slowest))))
