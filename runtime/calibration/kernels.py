"""Kernels that represent the operators of a training step, on operands of a workload.

Each kernel allocates its result, as it does in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor

from planner.graph.operator_classes import OperatorClass, operator_class
from runtime.measure.optimizer import LocalOptimizer

aten = torch.ops.aten


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
    key
        Of its own rate, where that is not the rate of its class; see :class:`~planner.machine.cluster.DeviceSpec`.
    moved
        Bytes that it reads and writes, where inputs and results do not say so.
    """

    name: str
    run: Callable[[], Tensor | Sequence[Tensor]]
    inputs: tuple[Tensor, ...] = ()
    flops: int = 0
    key: str = ""
    moved: int | None = None

    @property
    def kind(self) -> OperatorClass:
        """Its class."""
        return OperatorClass.OPTIMIZER if self.moved is not None else operator_class(self.name)


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes and dtypes of the kernels.

    Parameters
    ----------
    device
        Kind of device.
    rows, width, words
        Tokens, size of a hidden state, and entries of a vocabulary.
    dtype
        Of hidden states.
    products
        Dtypes of matrix products.
    attention
        Batch, heads, tokens, and size of a head.
    image
        Batch, channels, height and width.
    optimizers, parameters
        Names of optimizers, and how many parameters one of their calls updates.
    own_kernels
        Whether attention in 32 bits and products whose rows are not aligned have kernels of their own, as on CUDA.
    """

    device: str
    rows: int
    width: int
    words: int
    dtype: torch.dtype
    products: tuple[torch.dtype, ...]
    attention: tuple[int, int, int, int]
    image: tuple[int, int, int, int]
    optimizers: tuple[str, ...]
    parameters: int = 1
    own_kernels: bool = False

    def normal(self, *shape: int, dtype: torch.dtype | None = None, requires_grad: bool = False) -> Tensor:
        """Random numbers on the device, of :attr:`dtype` where nothing else is said."""
        drawn = torch.randn(shape, device=self.device).to(dtype or self.dtype)
        return drawn.requires_grad_(requires_grad)


WORKLOADS = {
    "cpu": Workload(
        "cpu", 1024, 768, 4096, torch.float32, (torch.float32, torch.bfloat16),
        (1, 16, 512, 64), (4, 64, 56, 56), ("adamw",),
    ),
    "cuda": Workload(
        "cuda", 16384, 2048, 32768, torch.bfloat16, (torch.float32, torch.bfloat16, torch.float16),
        (4, 16, 2048, 64), (32, 256, 56, 56), ("adamw", "adamw_mixed"), 8, True,
    ),
}  # fmt: skip
"""By kind of device. On CPUs the layers of a small language model, whose operands pass through caches as they do in a
step; on CUDA those of one that keeps the device busy."""


def kernels(work: Workload) -> Iterator[Kernel]:
    """Kernels of every class; operands live only while their class is timed."""
    for group in (_products, _attention, _convolutions, _pointwise, _normalizations, _indexing, _optimizers):
        yield from group(work)


def _products(work: Workload) -> Iterator[Kernel]:
    rows, width = work.rows, work.width
    for dtype in work.products:
        narrow, wide = work.normal(rows, width, dtype=dtype), work.normal(rows, 4 * width, dtype=dtype)
        weight = work.normal(width, 4 * width, dtype=dtype)
        flops = 2 * rows * width * 4 * width
        yield Kernel("mm", partial(torch.mm, narrow, weight), (narrow, weight), flops)
        yield Kernel("mm", partial(torch.mm, wide, weight.t()), (wide, weight), flops)
        yield Kernel("mm", partial(torch.mm, narrow.t(), wide), (narrow, wide), flops)
    if work.own_kernels:
        narrow, odd = work.normal(rows, width), work.normal(width, 4 * width + 1)
        flops = 2 * rows * width * (4 * width + 1)
        yield Kernel("mm", partial(torch.mm, narrow, odd), (narrow, odd), flops, "unaligned_matmul")


def _attention(work: Workload) -> Iterator[Kernel]:
    """Causal attention as language models have it; the mask halves its FLOP, as in the graph."""
    batch, heads, length, width = work.attention
    product = batch * heads * length * length * width
    # On CUDA attention in 32 bits has another kernel, with rates of its own.
    keyed = {work.dtype: ("", "")}
    if work.own_kernels:
        keyed[torch.float32] = ("efficient_attention_forward", "efficient_attention_backward")
    for dtype, (forward_key, backward_key) in keyed.items():
        query, key, value = (work.normal(*work.attention, dtype=dtype, requires_grad=True) for _ in range(3))
        forward = partial(_attended, query.detach(), key.detach(), value.detach())
        output = _attended(query, key, value)
        backward, gradient = _backward_of(output, (query, key, value))
        name = "_scaled_dot_product_flash_attention"
        yield Kernel(name, forward, (query, key, value), 2 * product, forward_key)
        yield Kernel(f"{name}_backward", backward, (query, key, value, gradient), 5 * product, backward_key)


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _convolutions(work: Workload) -> Iterator[Kernel]:
    channels = work.image[1]
    image = work.normal(*work.image, requires_grad=True)
    weight = work.normal(channels, channels, 3, 3, requires_grad=True)
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


def _pointwise(work: Workload) -> Iterator[Kernel]:
    first, second = work.normal(2, work.rows, 2 * work.width)
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
    yield Kernel("zeros", partial(torch.zeros_like, first))


def _normalizations(work: Workload) -> Iterator[Kernel]:
    width = work.width
    hidden, weight = work.normal(work.rows, width), work.normal(width)
    forward = partial(aten.native_layer_norm, hidden, [width], weight, weight, 1e-5)
    output, mean, scale = forward()
    backward = partial(
        aten.native_layer_norm_backward, output, hidden, [width], mean, scale, weight, weight, [True] * 3
    )
    yield Kernel("native_layer_norm", forward, (hidden, weight, weight))
    yield Kernel("native_layer_norm_backward", backward, (output, hidden, mean, scale, weight, weight))
    logits = work.normal(min(work.rows, 2048), work.words, dtype=torch.float32)
    labels = torch.randint(0, work.words, logits.shape[:1], device=work.device)
    loss, count = aten.nll_loss_forward(logits, labels, None, 1, -100)
    backward = partial(aten.nll_loss_backward, loss, logits, labels, None, 1, -100, count)
    yield Kernel("nll_loss_forward", partial(aten.nll_loss_forward, logits, labels, None, 1, -100), (logits, labels))
    yield Kernel("nll_loss_backward", backward, (loss, logits, labels, count))
    for name in ("_softmax", "_log_softmax"):
        result = getattr(aten, name)(logits, 1, False)
        backward = partial(getattr(aten, f"{name}_backward_data"), logits, result, 1, torch.float32)
        yield Kernel(name, partial(getattr(aten, name), logits, 1, False), (logits,))
        yield Kernel(f"{name}_backward_data", backward, (logits, result))


def _indexing(work: Workload) -> Iterator[Kernel]:
    table = work.normal(work.words, work.width)
    indices = torch.randint(0, work.words, (work.rows,), device=work.device)
    rows = functional.embedding(indices, table)
    backward = partial(aten.embedding_dense_backward, rows, indices, work.words, -1, False)
    yield Kernel("embedding", partial(functional.embedding, indices, table), (table, indices))
    yield Kernel("embedding_dense_backward", backward, (rows, indices))
    yield Kernel(
        "slice_backward", partial(aten.slice_backward, rows, [work.rows, 3 * work.width], 1, 0, work.width, 1), (rows,)
    )


def _optimizers(work: Workload) -> Iterator[Kernel]:
    """Updates as the executor makes them."""
    shape, names = (4 * work.width, work.width), [f"weight {at}" for at in range(work.parameters)]
    for name in work.optimizers:
        weights = {each: work.normal(*shape) for each in names}
        gradients = {each: torch.randn_like(weight) for each, weight in weights.items()}
        optimizer = LocalOptimizer(name, weights, last=True)
        dtype = str(work.dtype).removeprefix("torch.")
        moved = work.parameters * optimizer.spec.moved_bytes(dtype, shape[0] * shape[1], dtype)
        run = partial(_updated, optimizer, weights, gradients)
        yield Kernel(name, run, tuple(weights.values()), moved=moved)


def _updated(optimizer: LocalOptimizer, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> tuple[Tensor, ...]:
    optimizer.begin_step()
    for name, gradient in gradients.items():
        optimizer.update(name, gradient)
    optimizer.end_step()
    return tuple(weights.values())
