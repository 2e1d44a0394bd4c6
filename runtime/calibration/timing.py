"""Seconds of one call on this rank: by the clock of the processor, or by events of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import quantiles
from time import perf_counter, thread_time

import torch
import torch.distributed as dist

LAUNCHES = 1000
_ROUNDS, _WARM_UP, _MOST_CALLS = 5, 3, 500
_BLOCKING_WIDTH, _BLOCKING_PRODUCTS = 8192, 30

aten = torch.ops.aten


def time_call(call: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Seconds of one undisturbed call, over about ``seconds`` seconds and at least three calls after a first one.

    On CUDA calls follow each other without a wait of the host, as in a step.
    """
    if device.type == "cuda":
        return _time_on_device(call, seconds, device)
    call()
    if dist.is_initialized():
        dist.barrier()
    # Processor time excludes other programs, but sums over threads, so it serves for a single thread only.
    return _repeated(call, seconds, thread_time if torch.get_num_threads() == 1 else perf_counter)


def wall_time(call: Callable[[], object], seconds: float) -> float:
    """Seconds of one undisturbed call, waiting for a processor included, over about ``seconds`` seconds."""
    call()
    return _repeated(call, seconds, perf_counter)


def waited_time(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one undisturbed call until the CUDA device is done, after a first one."""
    times = []
    for _ in range(_ROUNDS + 1):
        torch.cuda.synchronize(device)
        start = perf_counter()
        call()
        torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    return undisturbed(times[1:])


def launch_seconds(seconds: float, device: torch.device) -> float:
    """Seconds of a kernel that does next to nothing; on CUDA those of the device, not of the host that starts it."""
    one = torch.ones(1, device=device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            aten.add.Tensor(one, one)

    if device.type != "cuda":
        return time_call(launch, seconds, device) / LAUNCHES
    large = torch.ones(_BLOCKING_WIDTH, _BLOCKING_WIDTH, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(_ROUNDS):
        for _ in range(_BLOCKING_PRODUCTS):  # so long that all launches wait behind them
            torch.mm(large, large)
        times.append(_between_events(launch, device) / LAUNCHES)
    return undisturbed(times)


def dispatch_seconds(device: torch.device) -> float:
    """Seconds that the host takes to start a kernel on a device."""
    one, times = torch.ones(1, device=device), []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize(device)
        start = perf_counter()
        for _ in range(LAUNCHES):
            aten.add.Tensor(one, one)
        times.append((perf_counter() - start) / LAUNCHES)
    return undisturbed(times)


def undisturbed(times: Sequence[float]) -> float:
    """Lower quartile of timings, since other programs on the machine can only add time."""
    return max(min(times), quantiles(times, n=4)[0])


def _repeated(call: Callable[[], object], seconds: float, clock: Callable[[], float]) -> float:
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < 3 or perf_counter() < end:
        start = clock()
        call()
        times.append(clock() - start)
    return undisturbed(times)


def _time_on_device(call: Callable[[], object], seconds: float, device: torch.device) -> float:
    for _ in range(_WARM_UP):
        call()
    estimate = _between_events(call, device)
    count = max(1, min(_MOST_CALLS, int(seconds / _ROUNDS / max(estimate, 1e-6))))

    def calls() -> None:
        for _ in range(count):
            call()

    return undisturbed([_between_events(calls, device) / count for _ in range(_ROUNDS)])


def _between_events(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of what a call starts on the device's stream."""
    begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begun.record()
    call()
    ended.record()
    torch.cuda.synchronize(device)
    return float(begun.elapsed_time(ended)) / 1e3
