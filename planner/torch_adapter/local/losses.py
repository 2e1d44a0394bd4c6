"""Softmax and negative log-likelihood on shards of the batch and of the classes.

With the classes sharded (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM, 2021, section 3.2) only one number per row crosses the mesh axis, never the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.graph.placement import is_shard
from planner.torch_adapter.local.context import LocalContext, LocalFunction, UnsupportedOperatorError, torch_dtype

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2
_IGNORED = -100  # label of rows whose class another rank holds


def _reduction_dim(context: LocalContext, name: str) -> int:
    dim = int(context.named["dim"])
    rank = len(context.spec(name).shape)
    return dim + rank if dim < 0 else dim


def softmax(context: LocalContext) -> LocalFunction | None:
    """``_softmax`` and ``_log_softmax`` with the reduced dimension sharded; None where it is not."""
    dim = _reduction_dim(context, "self")
    axes = context.axes_of("self", dim)
    if not axes:
        return None
    dtype, logarithm = _output_dtype(context), context.call.target is aten._log_softmax.default

    def run(tensor: Tensor) -> Tensor:
        wide = tensor.to(_accumulation(dtype))
        local = torch.logsumexp(wide, dim, keepdim=True)
        largest = context.all_reduce(local, "max", axes)
        total = context.all_reduce((local - largest).exp_(), "sum", axes)
        result = wide - total.log_().add_(largest)
        return (result if logarithm else result.exp_()).to(dtype)

    return run


def log_softmax_backward(context: LocalContext) -> LocalFunction | None:
    """Gradient of ``_log_softmax`` with the reduced dimension sharded: g - exp(y) sum(g)."""
    dim = _reduction_dim(context, "output")
    axes = context.axes_of("output", dim)
    if not axes:
        return None
    dtype = _output_dtype(context)

    def run(gradient: Tensor, output: Tensor) -> Tensor:
        wide = _accumulation(gradient.dtype)
        total = context.all_reduce(gradient.sum(dim, keepdim=True, dtype=wide), "sum", axes)
        return output.to(wide).exp().mul_(total).neg_().add_(gradient).to(dtype)

    return run


def softmax_backward(context: LocalContext) -> LocalFunction | None:
    """Gradient of ``_softmax`` with the reduced dimension sharded: y (g - sum(g y))."""
    dim = _reduction_dim(context, "output")
    axes = context.axes_of("output", dim)
    if not axes:
        return None
    dtype = _output_dtype(context)

    def run(gradient: Tensor, output: Tensor) -> Tensor:
        total = context.all_reduce(
            (gradient * output).sum(dim, keepdim=True, dtype=_accumulation(gradient.dtype)), "sum", axes
        )
        return (gradient - total).mul_(output).to(dtype)

    return run


def _output_dtype(context: LocalContext) -> torch.dtype:
    output = context.output_specs[0]
    assert output is not None
    return torch_dtype(output.dtype)


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    """Sums over classes are taken in at least float32, as torch's own kernels do."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _Labels:
    """Labels by their numbers in this rank's block of classes."""

    def __init__(self, context: LocalContext) -> None:
        if context.named.get("weight") is not None:
            raise UnsupportedOperatorError("nll_loss with class weights cannot be sharded: replicate it")
        scores = context.spec("self")
        self.class_dim = 1 if len(scores.shape) > 1 else 0
        self.class_axes = context.axes_of("self", self.class_dim)
        self.batch_axes = tuple(axis for axis, entry in enumerate(context.placement("target")) if is_shard(entry))
        self.reduction, self.ignored = int(context.named["reduction"]), int(context.named["ignore_index"])
        self.start = context.block_start("self", self.class_dim)
        self.count = context.input_shape("self")[self.class_dim]

    def local(self, labels: Tensor) -> Tensor:
        """Labels minus the block's start; :data:`_IGNORED` where ignored or in another rank's block."""
        here = labels - self.start
        elsewhere = (here < 0).logical_or_(here >= self.count).logical_or_(labels == self.ignored)
        return here.masked_fill_(elsewhere, _IGNORED)


def nll_loss_forward(context: LocalContext) -> LocalFunction | None:
    """Negative log-likelihood; a mean divides by the number of counted rows of all ranks.

    Rows are counted and their losses added up in at least 32 bits: in float16 a sum ends at 65,504, and bfloat16 counts
    to 256.
    """
    labels = _Labels(context) if context.is_sharded else None
    if labels is None or not (labels.class_axes or (labels.batch_axes and labels.reduction == _MEAN)):
        return None

    dtype = torch_dtype(context.spec("self").dtype)
    wide = _accumulation(dtype)
    reduction = _NONE if labels.reduction == _NONE or wide != dtype else _SUM
    local = context.operator(reduction=reduction, ignore_index=_IGNORED)

    def run(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss, _ = local(scores, labels.local(target))
        if labels.reduction == _NONE:
            return loss, scores.new_zeros(())
        if reduction == _NONE:
            loss = loss.sum(dtype=wide)
        counted = (target != labels.ignored).sum().to(wide)
        if labels.reduction == _SUM:
            return loss.to(dtype), counted.to(dtype)
        counted = context.all_reduce(counted, "sum", labels.batch_axes)
        return (loss / counted).to(dtype), counted.to(dtype)

    return run


def nll_loss_backward(context: LocalContext) -> LocalFunction | None:
    """Gradient of the negative log-likelihood with the classes sharded."""
    labels = _Labels(context) if context.is_sharded else None
    if labels is None or not labels.class_axes:
        return None
    target = context.position("target")
    local = context.operator(ignore_index=_IGNORED)

    def run(*tensors: Tensor) -> Any:
        filled = list(tensors)
        filled[target] = labels.local(tensors[target])
        return local(*filled)

    return run
