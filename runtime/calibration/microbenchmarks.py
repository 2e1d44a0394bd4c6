"""Timing on one rank of small kernels and collectives that represent the operators of a training step.

Sizes are those of the layers of a small language model: operands pass through caches as they do in a
step, and each kernel allocates its result, as it does there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from time import perf_counter, thread_time

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor

from planner.graph.operator_classes import memory_passes, operator_class
from planner.graph.placement import Placement, local_numel, local_shape
from planner.machine.calibration import CollectiveSample, KernelSample, OverlapSample, RankReport
from planner.machine.resharding import step_between, step_copies
from planner.torch_adapter.local.collectives import MeshGroups, reshard_step

aten = torch.ops.aten
COLLECTIVE_WIDTHS = (16, 64, 256, 512, 1024)
OVERLAPPED_WORDS = 2**24
LAUNCHES = 1000
ROWS, WIDTH, WORDS = 1024, 768, 4096


@dataclass(frozen=True, slots=True)
class Kernel:
    """One call to time.

    Parameters
    ----------
    name
        Name of the ATen operator that it stands for.
    run
        The call; returns its results.
    inputs
        Tensors that it reads.
    flops
        FLOP of one call where its class is priced by them.
    """

    name: str
    run: Callable[[], Tensor | Sequence[Tensor]]
    inputs: tuple[Tensor, ...] = ()
    flops: int = 0


def measure_rank(groups: MeshGroups, seconds: float) -> RankReport:
    """Time everything on this rank, each thing for about ``seconds`` seconds; all ranks must call it."""
    return RankReport(
        launch_seconds=time_call(_launch_many, seconds) / LAUNCHES,
        kernels=tuple(_kernel_sample(kernel, seconds) for kernel in kernels()),
        collectives=tuple(_collective_samples(groups, seconds)),
        overlap=_overlap_sample(seconds),
    )


def time_call(call: Callable[[], object], seconds: float) -> float:
    """Seconds of one undisturbed call, over about ``seconds`` seconds and at least three calls after a first one."""
    call()
    if dist.is_initialized():
        dist.barrier()
    # Processor time excludes other programs, but sums over threads, so it serves for a single thread only.
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < 3 or perf_counter() < end:
        start = clock()
        call()
        times.append(clock() - start)
    return _undisturbed(times)


def _launch_many() -> None:
    one = torch.ones(1)
    for _ in range(LAUNCHES):
        aten.add.Tensor(one, one)


def kernels() -> Iterator[Kernel]:
    """Kernels of every class; operands live only while their class is timed."""
    for group in (_products, _attention, _convolutions, _pointwise, _normalizations, _indexing, _optimizer):
        yield from group()


def _products() -> Iterator[Kernel]:
    for dtype in (torch.float32, torch.bfloat16):
        narrow = torch.randn(ROWS, WIDTH, dtype=dtype)
        wide = torch.randn(ROWS, 4 * WIDTH, dtype=dtype)
        weight = torch.randn(WIDTH, 4 * WIDTH, dtype=dtype)
        flops = 2 * ROWS * WIDTH * 4 * WIDTH
        yield Kernel("mm", partial(torch.mm, narrow, weight), (narrow, weight), flops)
        yield Kernel("mm", partial(torch.mm, wide, weight.t()), (wide, weight), flops)
        yield Kernel("mm", partial(torch.mm, narrow.t(), wide), (narrow, wide), flops)


def _attention() -> Iterator[Kernel]:
    """Causal attention as language models have it; the mask halves its FLOP, as in the graph."""
    batch, heads, length, width = 1, 16, 512, 64
    query, key, value = (torch.randn(batch, heads, length, width, requires_grad=True) for _ in range(3))
    product = batch * heads * length * length * width
    operands = (query, key, value)
    detached = (query.detach(), key.detach(), value.detach())
    forward = partial(functional.scaled_dot_product_attention, *detached, is_causal=True)
    output = functional.scaled_dot_product_attention(*operands, is_causal=True)
    backward, gradient = _backward_of(output, operands)
    yield Kernel("_scaled_dot_product_flash_attention", forward, operands, 2 * product)
    yield Kernel("_scaled_dot_product_flash_attention_backward", backward, (*operands, gradient), 5 * product)


def _convolutions() -> Iterator[Kernel]:
    image = torch.randn(4, 64, 56, 56, requires_grad=True)
    weight = torch.randn(64, 64, 3, 3, requires_grad=True)
    flops = 2 * image.numel() * weight[:, 0].numel()
    operands = (image, weight)
    forward = partial(functional.conv2d, image.detach(), weight.detach(), padding=1)
    backward, gradient = _backward_of(functional.conv2d(image, weight, padding=1), operands)
    yield Kernel("convolution", forward, operands, flops)
    yield Kernel("convolution_backward", backward, (*operands, gradient), 2 * flops)


def _backward_of(output: Tensor, operands: tuple[Tensor, ...]) -> tuple[Callable[[], tuple[Tensor, ...]], Tensor]:
    """Call that computes the gradients of ``operands``, and its input, the gradient of ``output``."""
    gradient = torch.randn_like(output)
    return partial(torch.autograd.grad, output, operands, gradient, retain_graph=True), gradient


def _pointwise() -> Iterator[Kernel]:
    first, second = torch.randn(2, ROWS, 2 * WIDTH)
    for name in ("tanh", "gelu", "silu", "exp"):
        yield Kernel(name, partial(getattr(aten, name), first), (first,))
    for name in ("tanh_backward", "gelu_backward", "silu_backward", "add", "mul"):
        yield Kernel(name, partial(getattr(aten, name), first, second), (first, second))
    for name in ("add", "mul", "pow"):
        yield Kernel(name, partial(getattr(aten, name), first, 3.0), (first,))
    yield Kernel("clone", first.clone, (first,))
    yield Kernel("clone", first.t().contiguous, (first,))
    yield Kernel("cat", partial(torch.cat, (first, second), dim=1), (first, second))
    yield Kernel("sum", partial(torch.sum, first, 0), (first,))
    yield Kernel("sum", partial(torch.sum, first, 1), (first,))
    yield Kernel("zeros", partial(torch.zeros, ROWS, 2 * WIDTH))


def _normalizations() -> Iterator[Kernel]:
    hidden, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH)
    forward = partial(aten.native_layer_norm, hidden, [WIDTH], weight, weight, 1e-5)
    output, mean, scale = forward()
    backward = partial(
        aten.native_layer_norm_backward, output, hidden, [WIDTH], mean, scale, weight, weight, [True] * 3
    )
    yield Kernel("native_layer_norm", forward, (hidden, weight, weight))
    yield Kernel("native_layer_norm_backward", backward, (output, hidden, mean, scale, weight, weight))
    logits = torch.randn(ROWS, WORDS)
    for name in ("_softmax", "_log_softmax"):
        result = getattr(aten, name)(logits, 1, False)
        backward = partial(getattr(aten, f"{name}_backward_data"), logits, result, 1, torch.float32)
        yield Kernel(name, partial(getattr(aten, name), logits, 1, False), (logits,))
        yield Kernel(f"{name}_backward_data", backward, (logits, result))


def _indexing() -> Iterator[Kernel]:
    table, indices = torch.randn(WORDS, WIDTH), torch.randint(0, WORDS, (ROWS,))
    rows = functional.embedding(indices, table)
    backward = partial(aten.embedding_dense_backward, rows, indices, WORDS, -1, False)
    yield Kernel("embedding", partial(functional.embedding, indices, table), (table, indices))
    yield Kernel("embedding_dense_backward", backward, (rows, indices))
    yield Kernel("slice_backward", partial(aten.slice_backward, rows, [ROWS, 3 * WIDTH], 1, 0, WIDTH, 1), (rows,))


def _optimizer() -> Iterator[Kernel]:
    """AdamW as an elementwise kernel: inputs stand for the tensors that it reads, results for those that it writes."""
    weight = torch.nn.Parameter(torch.randn(4 * WIDTH, WIDTH))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], foreach=False)

    def step() -> tuple[Tensor, ...]:
        optimizer.step()
        return (weight,) * 3

    yield Kernel("adamw", step, (weight,) * 4)


def _kernel_sample(kernel: Kernel, seconds: float) -> KernelSample:
    results = kernel.run()
    outputs = (results,) if isinstance(results, Tensor) else tuple(results)
    kind = operator_class(kernel.name)
    reads_all, passes = memory_passes(kind)
    read = sum(tensor.nbytes for tensor in kernel.inputs if reads_all or not tensor.is_floating_point())
    first = kernel.inputs[0] if kernel.inputs else outputs[0]
    return KernelSample(
        name=kernel.name,
        kind=kind,
        dtype=str(first.dtype).removeprefix("torch."),
        flops=kernel.flops,
        nbytes=read + passes * sum(tensor.nbytes for tensor in outputs),
        seconds=time_call(kernel.run, seconds),
    )


def _collective_samples(groups: MeshGroups, seconds: float) -> Iterator[CollectiveSample]:
    """Steps as the executor runs them, on square tensors of several sizes."""
    ranks = groups.shape[0]
    changes: tuple[tuple[Placement, Placement], ...] = (
        (("Psum",), ("R",)),
        (("S0",), ("R",)),
        (("Psum",), ("S0",)),
        (("S0",), ("S1",)),
    )
    for width in COLLECTIVE_WIDTHS:
        shape = (width * ranks, width * ranks)
        for before, after in changes:
            step = step_between(before, after)
            assert step is not None
            assert step.collective is not None
            tensor = torch.ones(local_shape(shape, before, groups.shape))
            old, new = (4 * local_numel(shape, placement, groups.shape) for placement in (before, after))
            yield CollectiveSample(
                collective=step.collective,
                ranks=ranks,
                nbytes=max(old, new),
                copied_bytes=sum(step_copies(step, old, new)),
                seconds=_agreed_time(partial(reshard_step(before, after, groups), tensor), seconds),
            )


def _overlap_sample(seconds: float) -> OverlapSample:
    """A large all-reduce in a group of its own, and kernels of a layer beside it until it is done."""
    group, tensor = dist.new_group(), torch.zeros(OVERLAPPED_WORDS)
    narrow, weight = torch.randn(ROWS // 4, WIDTH), torch.randn(WIDTH, WIDTH)

    def compute() -> None:
        hidden = functional.gelu(torch.mm(narrow, weight))
        functional.layer_norm(hidden + narrow, (WIDTH,))

    def reduce() -> Tensor:
        dist.all_reduce(tensor, group=group)
        return tensor

    collective_alone = _agreed_time(reduce, seconds)
    dist.barrier()
    computation_alone = _wall_time(compute, seconds)
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
        computation_beside=_undisturbed(computations),
        collective_alone=collective_alone,
        collective_beside=_undisturbed(collectives),
    )


def _wall_time(call: Callable[[], object], seconds: float) -> float:
    """Seconds of one undisturbed call, waiting for a processor included, over about ``seconds`` seconds."""
    call()
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < 3 or perf_counter() < end:
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return _undisturbed(times)


def _agreed_time(call: Callable[[], Tensor], seconds: float) -> float:
    """Seconds of one undisturbed collective; the ranks agree on the number of calls, which avoids a deadlock."""
    call()
    dist.barrier()
    start = perf_counter()
    for _ in range(3):
        call()
    times = []
    for _ in range(_agreed_count((perf_counter() - start) / 3, seconds)):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return _undisturbed(times)


def _agreed_count(estimate: float, seconds: float) -> int:
    """Calls in so many seconds, each of which takes an estimated time; the same on all ranks."""
    slowest = torch.tensor(estimate)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(3, min(500, int(seconds / float(slowest))))


def _undisturbed(times: Sequence[float]) -> float:
    """Lower quartile of timings, since other programs on the machine can only add time."""
    return max(min(times), quantiles(times, n=4)[0])
