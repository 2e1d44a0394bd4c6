"""RMS normalization as one operator, forward and backward (Zhang and Sennrich 2019).

Torch has one kernel for it on CUDA, and none on the CPU, on which steps are traced: there it falls apart into eight
operators, which on an NVIDIA H200 took five times the seconds. Traces have these operators in their place. On CUDA they
call torch's kernels; elsewhere they compute some rows at a time, so that they hold little beside their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten
FORWARD, BACKWARD = "meshwright::rms_norm", "meshwright::rms_norm_backward"
_AT_ONCE = 2**18
"""Elements that are computed at once where torch has no kernel."""


@torch.library.custom_op(FORWARD, mutates_args=())
def rms_norm(input: Tensor, weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """Normalized and weighted input, and the inverse root mean square of each row, in 32 bits at least.

    Parameters
    ----------
    input
        Any dimensions, of which the last are those of ``weight``.
    weight
        One entry per element of a row.
    eps
        Added to the mean of the squares; None: the smallest step of the dtype.
    """
    if input.is_cuda:
        output, scale = aten._fused_rms_norm.default(input, list(weight.shape), weight, eps)
        return output.contiguous(), scale
    output, scale = _results(input, weight)
    rows = prod(weight.shape)
    flat, flat_output, flat_scale = input.reshape(-1, rows), output.view(-1, rows), scale.view(-1, 1)
    for some in _blocks(*flat.shape):
        wide = flat[some].to(scale.dtype)
        least = torch.finfo(scale.dtype).eps if eps is None else eps
        flat_scale[some] = wide.square().mean(1, keepdim=True).add_(least).rsqrt_()
        flat_output[some] = (wide * flat_scale[some]).mul_(weight.reshape(-1))
    return output, scale


@torch.library.custom_op(BACKWARD, mutates_args=())
def rms_norm_backward(gradient: Tensor, input: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight; ``scale`` is the second result of :func:`rms_norm`."""
    if input.is_cuda:
        shape = list(weight.shape)
        found = aten._fused_rms_norm_backward.default(gradient, input, shape, scale, weight, [True, True])
        return found[0].contiguous(), found[1]
    result, rows = torch.empty_like(input, memory_format=torch.contiguous_format), prod(weight.shape)
    total = torch.zeros(rows, dtype=scale.dtype, device=input.device)
    flat, incoming, flat_result = input.reshape(-1, rows), gradient.reshape(-1, rows), result.view(-1, rows)
    flat_scale, wide_weight = scale.reshape(-1, 1), weight.reshape(-1).to(scale.dtype)
    for some in _blocks(*flat.shape):
        normal = flat[some].to(scale.dtype) * flat_scale[some]
        wide = incoming[some].to(scale.dtype)
        total += (wide * normal).sum(0)
        wide = wide * wide_weight
        flat_result[some] = (wide - normal * (wide * normal).mean(1, keepdim=True)).mul_(flat_scale[some])
    return result, total.to(weight.dtype).view(weight.shape)


@rms_norm.register_fake
def _results(input: Tensor, weight: Tensor, eps: float | None = None) -> tuple[Tensor, Tensor]:
    wide = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    rows = (*input.shape[: input.ndim - weight.ndim], *(1 for _ in weight.shape))
    return torch.empty_like(input, memory_format=torch.contiguous_format), input.new_empty(rows, dtype=wide)


@rms_norm_backward.register_fake
def _gradients(gradient: Tensor, input: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float | None], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _backward(ctx: Any, gradient: Tensor, _: object) -> tuple[Tensor, Tensor, None]:
    input, weight, scale = ctx.saved_tensors
    return *rms_norm_backward(gradient, input, scale, weight), None


rms_norm.register_autograd(_backward, setup_context=_save)


def _blocks(count: int, rows: int) -> Iterator[slice]:
    some = max(1, _AT_ONCE // max(1, rows))
    return (slice(start, start + some) for start in range(0, count, some))


@contextmanager
def rms_norm_as_one_operator() -> Iterator[None]:
    """Let ``torch.nn.functional.rms_norm`` be :func:`rms_norm` where weight and input have one dtype."""
    composite: Callable[..., Tensor] = functional.rms_norm

    def found(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
        shape = tuple(normalized_shape)
        if weight is None or weight.dtype != input.dtype or not input.is_floating_point() or not input.numel():
            return composite(input, normalized_shape, weight, eps)
        if tuple(weight.shape) != shape or tuple(input.shape[input.ndim - len(shape) :]) != shape:
            return composite(input, normalized_shape, weight, eps)  # which says what is wrong
        output: Tensor = rms_norm(input, weight, eps)[0]
        return output

    with patch.object(functional, "rms_norm", found):
        yield
