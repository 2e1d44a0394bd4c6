"""CPU flash attention on other devices: a kernel of the device where one takes the shapes, else blocks of query rows.

A step is traced on the CPU, whose attention kernel exists nowhere else. On another device the same
operator has the same results and the same saved log-sum-exp. The kernels of CUDA are in
:mod:`planner.torch_adapter.local.attention_kernels`. The blocks are plain tensor operations: the forward of
Rabe and Staats (Self-attention does not need O(n^2) memory, 2021) and the backward of Dao et al.
(FlashAttention, 2022, Algorithm 4), one block of query rows at a time, so that no score matrix is whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from planner.graph.attention_kernels import BLOCK_ROWS, AttentionKernel, AttentionShapes
from planner.torch_adapter.local.attention_kernels import BACKWARD, FORWARD, KernelCall, capability_of
from planner.torch_adapter.local.context import LocalContext, LocalFunction, UnsupportedOperatorError


def attention_forward(context: LocalContext) -> LocalFunction | None:
    """Attention and its log-sum-exp on a device without the traced kernel; None on the CPU."""
    if _has_kernel(context):
        return None
    kernel = kernel_of(context)
    return blockwise_forward(context) if kernel is AttentionKernel.BLOCKS else kernel_forward(context, kernel)


def attention_backward(context: LocalContext) -> LocalFunction | None:
    """Gradients of query, key and value on a device without the traced kernel; None on the CPU."""
    if _has_kernel(context):
        return None
    kernel = kernel_of(context)
    return blockwise_backward(context) if kernel is AttentionKernel.BLOCKS else kernel_backward(context, kernel)


def _has_kernel(context: LocalContext) -> bool:
    return context.device is None or context.device.type == "cpu"


def kernel_of(context: LocalContext) -> AttentionKernel:
    """The kernel on the device of a local operator; blocks on a device that is not CUDA."""
    if context.device is None or context.device.type != "cuda":
        return AttentionKernel.BLOCKS
    query, key, value = (context.spec(name) for name in ("query", "key", "value"))
    shapes = AttentionShapes(
        query.dtype, query.shape, key.shape, value.shape, context.has("attn_mask"), bool(context.named["is_causal"])
    )
    return shapes.kernel(capability_of(context.device))


def kernel_forward(context: LocalContext, kernel: AttentionKernel) -> LocalFunction:
    """Output and log-sum-exp by a kernel of CUDA."""
    constants = _Constants(context)
    call, forward, mask_at = constants.call, FORWARD[kernel], constants.mask

    def attention(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return forward(call, *tensors[:3], None if mask_at is None else tensors[mask_at])

    return attention


def kernel_backward(context: LocalContext, kernel: AttentionKernel) -> LocalFunction:
    """Gradients of query, key and value by a kernel of CUDA."""
    constants = _Constants(context)
    call, backward, mask_at = constants.call, BACKWARD[kernel], constants.mask

    def attention_backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        mask = None if mask_at is None else tensors[mask_at]
        return backward(call, tensors[0], tensors[1:4], mask, tensors[4:6])

    return attention_backward


class _Constants:
    """Constants of an attention: what is masked and how scores are scaled."""

    def __init__(self, context: LocalContext) -> None:
        if float(context.named["dropout_p"]) != 0.0:
            raise UnsupportedOperatorError(
                f"{context.call.target} with dropout has no form for other devices: set it to 0"
            )
        self.causal, self.given_scale = bool(context.named["is_causal"]), context.named["scale"]
        self.mask = context.position("attn_mask") if context.has("attn_mask") else None

    @property
    def call(self) -> KernelCall:
        return KernelCall(self.causal, None if self.given_scale is None else float(self.given_scale))


class _Scores(_Constants):
    """Scaled and masked scores of blocks of query rows, as (batch, key heads, queries per key head, rows, keys)."""

    def scale(self, query: Tensor) -> float:
        return float(self.given_scale) if self.given_scale is not None else query.shape[-1] ** -0.5

    def blocks(self, query: Tensor, key: Tensor, tensors: tuple[Tensor, ...]) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their scores, block by block; ``query`` and ``key`` are grouped by key head."""
        batch, key_heads, repeat, length, _ = query.shape
        count = key.shape[-2]
        for start in range(0, length, BLOCK_ROWS):
            rows = slice(start, min(start + BLOCK_ROWS, length))
            scores = (query[..., rows, :] * self.scale(query)) @ key.transpose(-2, -1)
            if self.mask is not None:
                mask = tensors[self.mask].expand(batch, key_heads * repeat, length, count)[:, :, rows]
                scores += torch.unflatten(mask, 1, (key_heads, repeat))
            if self.causal:
                below = torch.arange(count, device=query.device) > torch.arange(
                    rows.start, rows.stop, device=query.device
                ).unsqueeze(-1)
                scores.masked_fill_(below, float("-inf"))
            yield rows, scores


def _grouped(tensor: Tensor, key_heads: int) -> Tensor:
    """(batch, heads, ...) as (batch, key heads, heads per key head, ...), in at least float32."""
    wide = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
    return torch.unflatten(wide, 1, (key_heads, tensor.shape[1] // key_heads))


def _probabilities(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Softmax of the scores, in place; zero in rows that are masked altogether."""
    return scores.sub_(logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)).exp_()


def blockwise_forward(context: LocalContext) -> LocalFunction:
    """Output (batch, heads, rows, head size), laid out rows before heads, and log-sum-exp (batch, heads, rows)."""
    scoring = _Scores(context)

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = tensors[:3]
        key_heads = key.shape[1]
        grouped, keys, values = (_grouped(tensor, key_heads) for tensor in (query, key, value))
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        saved = grouped.new_empty(batch, heads, length)
        for rows, scores in scoring.blocks(grouped, keys, tensors):
            logsumexp = scores.logsumexp(-1, keepdim=True)
            output[:, :, rows] = (_probabilities(scores, logsumexp) @ values).flatten(1, 2)
            saved[:, :, rows] = logsumexp.squeeze(-1).flatten(1, 2)
        return output, saved

    return run


def blockwise_backward(context: LocalContext) -> LocalFunction:
    """Gradients of query, key and value."""
    scoring = _Scores(context)

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradient, query, key, value, output, logsumexp = tensors[:6]
        key_heads = key.shape[1]
        query_of, key_of, value_of = (_grouped(tensor, key_heads) for tensor in (query, key, value))
        gradient_of, output_of, saved = (_grouped(tensor, key_heads) for tensor in (gradient, output, logsumexp))
        query_gradient = torch.empty_like(query)
        key_gradient, value_gradient = torch.zeros_like(key_of), torch.zeros_like(value_of)
        for rows, scores in scoring.blocks(query_of, key_of, tensors):
            probabilities = _probabilities(scores, saved[..., rows].unsqueeze(-1))
            incoming = gradient_of[..., rows, :]
            value_gradient += (probabilities.transpose(-2, -1) @ incoming).sum(2, keepdim=True)
            total = (incoming * output_of[..., rows, :]).sum(-1, keepdim=True)
            from_scores = (incoming @ value_of.transpose(-2, -1)).sub_(total).mul_(probabilities)
            from_scores *= scoring.scale(query)
            query_gradient[:, :, rows] = (from_scores @ key_of).flatten(1, 2).to(query.dtype)
            key_gradient += (from_scores.transpose(-2, -1) @ query_of[..., rows, :]).sum(2, keepdim=True)
        return query_gradient, key_gradient.flatten(1, 2).to(key.dtype), value_gradient.flatten(1, 2).to(value.dtype)

    return run
