"""Attention on CUDA: calls of torch's flash, memory-efficient and cuDNN kernels in the place of the CPU's.

The results are those of the traced operator: the output and the log-sum-exp of every row, (batch, heads, rows); three
gradients of a backward. Nothing is dropped out, so the kernels' random states are empty tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from planner.graph.attention_kernels import AttentionKernel

aten = torch.ops.aten
_ROWS = 32
"""The memory-efficient kernel keeps log-sum-exps of rows up to a multiple of these."""
_ALIGNED = 8
"""Elements by which rows must be aligned, for 16 bytes in 16 bits."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Constants of one attention.

    Parameters
    ----------
    causal
        Whether scores above the diagonal are left out.
    scale
        Of the scores; None for one over the root of the head size.
    """

    causal: bool
    scale: float | None

    def flash(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Forward of the flash kernel, in 16 bits and without a mask."""
        assert mask is None
        inputs = map(_aligned, (query, key, value))
        found = aten._scaled_dot_product_flash_attention.default(*inputs, 0.0, self.causal, False, scale=self.scale)
        return found[0], found[1]

    def flash_backward(
        self, gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, saved: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """Backward of the flash kernel; ``saved`` are output and log-sum-exp."""
        assert mask is None
        query, key, value = map(_aligned, inputs)
        output, logsumexp = saved
        state = gradient.new_empty(0, dtype=torch.int64)
        found = aten._scaled_dot_product_flash_attention_backward.default(
            _aligned(gradient), query, key, value, _aligned(output), logsumexp, None, None,
            query.shape[2], key.shape[2], 0.0, self.causal, state, state, scale=self.scale,
        )  # fmt: skip
        return tuple(found)

    def efficient(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Forward of the memory-efficient kernel."""
        query, key, value = _of_every_head(query, key, value)
        output, logsumexp, _, _ = aten._scaled_dot_product_efficient_attention.default(
            query, key, value, _bias(mask, query, key), True, 0.0, self.causal, scale=self.scale
        )
        return output, _rows_of(logsumexp, query.shape[2])

    def efficient_backward(
        self, gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, saved: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """Backward of the memory-efficient kernel; arguments as for :meth:`flash_backward`."""
        query, key, value = _of_every_head(*inputs)
        output, logsumexp = saved
        missing = -logsumexp.shape[2] % _ROWS
        state = gradient.new_empty(0, dtype=torch.int64)
        found = aten._scaled_dot_product_efficient_attention_backward.default(
            _aligned(gradient), query, key, value, _bias(mask, query, key), _aligned(output),
            functional.pad(logsumexp, (0, missing)) if missing else logsumexp, state, state, 0.0,
            [True, True, True, False], self.causal, scale=self.scale,
        )  # fmt: skip
        heads = inputs[1].shape[1]
        return found[0], *(_summed_heads(tensor, heads) for tensor in found[1:3])

    def cudnn(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Forward of cuDNN's kernel, in 16 bits."""
        query, key, value = map(_aligned, (query, key, value))
        found = aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, _bias(mask, query, key), True, 0.0, self.causal, False, scale=self.scale
        )
        return found[0], found[1].squeeze(-1)

    def cudnn_backward(
        self, gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, saved: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """Backward of cuDNN's kernel; arguments as for :meth:`flash_backward`."""
        query, key, value = map(_aligned, inputs)
        output, logsumexp = saved
        state = gradient.new_empty(0, dtype=torch.int64)
        found = aten._scaled_dot_product_cudnn_attention_backward.default(
            _aligned(gradient), query, key, value, _aligned(output), logsumexp.unsqueeze(-1), state, state,
            _bias(mask, query, key), None, None, query.shape[2], key.shape[2], 0.0, self.causal, scale=self.scale,
        )  # fmt: skip
        return tuple(found)


FORWARD: dict[AttentionKernel, Callable[..., tuple[Tensor, Tensor]]] = {
    AttentionKernel.FLASH: KernelCall.flash,
    AttentionKernel.EFFICIENT: KernelCall.efficient,
    AttentionKernel.CUDNN: KernelCall.cudnn,
}
"""Forward by kernel: of a call, queries, keys, values and mask."""

BACKWARD: dict[AttentionKernel, Callable[..., tuple[Tensor, ...]]] = {
    AttentionKernel.FLASH: KernelCall.flash_backward,
    AttentionKernel.EFFICIENT: KernelCall.efficient_backward,
    AttentionKernel.CUDNN: KernelCall.cudnn_backward,
}
"""Backward by kernel: of a call, the output's gradient, the inputs, the mask, and output and log-sum-exp."""


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    found: Any = torch.cuda.get_device_capability(device)
    return int(found[0]), int(found[1])


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor as kernels read it: rows of a head one after another in memory, each aligned; a copy where not."""
    rows = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    fits = tensor.stride(-1) == 1 and tensor.storage_offset() % _ALIGNED == 0
    return tensor if fits and all(step % _ALIGNED == 0 or size == 1 for step, size in rows) else _whole(tensor)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _rows_of(logsumexp: Tensor, rows: int) -> Tensor:
    return logsumexp if logsumexp.shape[2] == rows else _whole(logsumexp.narrow(2, 0, rows))


def _of_every_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, with as many heads each; keys and values are copied where heads share them."""
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = (tensor.repeat_interleave(repeat, dim=1) for tensor in (key, value))
    return _aligned(query), _aligned(key), _aligned(value)


def _summed_heads(gradient: Tensor, heads: int) -> Tensor:
    """Gradient of keys or values that heads of queries share."""
    if gradient.shape[1] == heads:
        return gradient
    return torch.unflatten(gradient, 1, (heads, -1)).sum(2)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Mask (batch, heads, rows, keys) in the dtype of the queries, its rows aligned in memory."""
    if mask is None:
        return None
    mask, keys = mask.to(query.dtype), key.shape[2]
    rows_apart = mask.stride(-2) if mask.shape[-2] > 1 else keys
    if mask.stride(-1) != 1 or rows_apart % _ALIGNED or mask.storage_offset() % _ALIGNED:
        mask = functional.pad(_whole(mask), (0, -keys % _ALIGNED)).narrow(-1, 0, keys)
    return mask.expand(*query.shape[:3], keys)
