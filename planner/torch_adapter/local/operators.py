"""Local operators: the ATen calls of one rank on its local tensors.

Most operators run as they are. Some carry global sizes among their constants, which become local; some
need the rank's place (lookups in a sharded table) or a collective (softmax over sharded classes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.graph.operator_graph import Operator, OperatorGraph, TensorSpec
from planner.graph.placement import Placement
from planner.torch_adapter.local import attention as local_attention
from planner.torch_adapter.local import losses as local_losses
from planner.torch_adapter.local.calls import OperatorCall
from planner.torch_adapter.local.context import AxisReducer, LocalContext, LocalFunction
from planner.torch_adapter.local.counter_random import random_operator

aten = torch.ops.aten
Builder = Callable[[LocalContext], LocalFunction | None]


def _reshape(context: LocalContext) -> LocalFunction:
    """Views by size: locals need not be contiguous where the global tensor was, so ``reshape``."""
    return context.operator(aten.reshape.default, self=context.named["self"], shape=list(context.output_shape()))


def _sized(argument: str) -> Builder:
    def build(context: LocalContext) -> LocalFunction:
        changes: dict[str, Any] = {argument: list(context.output_shape())}
        return context.operator(**changes)

    return build


def _strided_factory(context: LocalContext) -> LocalFunction:
    shape = list(context.output_shape())
    stride = list(torch.empty(shape, device="meta").stride()) if context.is_sharded else context.named["stride"]
    return context.operator(size=shape, stride=stride)


def _as_strided(context: LocalContext) -> LocalFunction:
    """Strided view, only of tensors in the traced layout: a resharded tensor may have other strides."""
    source, plain = context.input_specs[0], context.operator()

    def run(tensor: Tensor) -> Any:
        if tensor.stride() != source.stride:
            tensor = torch.empty_strided(source.shape, source.stride, dtype=tensor.dtype, device=tensor.device).copy_(
                tensor
            )
        return plain(tensor)

    return run


def _arange(context: LocalContext) -> LocalFunction:
    first, step = context.named.get("start", 0), context.named.get("step", 1)
    (offset,), (count,) = context.output_starts(), context.output_shape()
    start = first + offset * step
    options = {name: context.named[name] for name in ("dtype", "layout", "device", "pin_memory")}
    return context.operator(aten.arange.start_step, start=start, end=start + count * step, step=step, **options)


def _summand(name: str, absent: dict[str, Any]) -> Builder:
    """A summand that is replicated while the result is a pending sum is added by one rank."""

    def build(context: LocalContext) -> LocalFunction | None:
        if not context.has(name) or context.adds_here(name):
            return None
        return context.operator(**absent)

    return build


def _convolution(context: LocalContext) -> LocalFunction:
    changes: dict[str, Any] = {"groups": _local_groups(context)}
    if context.has("bias") and not context.adds_here("bias"):
        changes["bias"] = None
    return context.operator(**changes)


def _local_groups(context: LocalContext) -> int:
    """Groups on this rank: sharded input channels with groups are whole groups."""
    groups = int(context.named["groups"])
    if groups == 1:
        return 1
    return groups * context.input_shape("input")[1] // context.spec("input").shape[1]


def _convolution_backward(context: LocalContext) -> LocalFunction:
    sizes = context.named["bias_sizes"]
    local = None if sizes is None else [context.input_shape("grad_output")[1]]
    return context.operator(groups=_local_groups(context), bias_sizes=local)


def _group_norm(context: LocalContext) -> LocalFunction:
    local, whole = context.input_shape("input"), context.spec("input").shape
    group = int(context.named["group"]) * local[1] // whole[1]
    return context.operator(N=local[0], C=local[1], group=group)


def _embedding(context: LocalContext) -> LocalFunction | None:
    """Lookup in a block of the rows: zero where another rank holds the row."""
    if not context.axes_of("weight", 0):
        return None
    start, rows = context.block_start("weight", 0), context.input_shape("weight")[0]

    def run(weight: Tensor, indices: Tensor) -> Tensor:
        here = indices - start
        elsewhere = (here < 0).logical_or_(here >= rows)
        result: Tensor = aten.embedding.default(weight, here.masked_fill_(elsewhere, 0))
        return result.masked_fill_(elsewhere.unsqueeze(-1), 0)

    return run


def _embedding_backward(context: LocalContext) -> LocalFunction | None:
    """Gradient of a block of the rows: indices elsewhere become the padding index, which is skipped."""
    rows = context.output_shape()[0]
    if rows == int(context.named["num_weights"]):
        return None
    start, padding = context.output_starts()[0], int(context.named["padding_idx"])
    by_frequency = bool(context.named["scale_grad_by_freq"])

    def run(gradient: Tensor, indices: Tensor) -> Any:
        here = indices - start
        skipped = (here < 0).logical_or_(here >= rows).logical_or_(indices == padding)
        return aten.embedding_dense_backward.default(gradient, here.masked_fill_(skipped, -1), rows, -1, by_frequency)

    return run


def _mean_loss_backward(context: LocalContext) -> LocalFunction | None:
    """Gradient of an elementwise loss averaged over all elements: divide by the global count."""
    whole, reduction_mean, reduction_sum = context.spec("self").numel, 1, 2
    if int(context.named["reduction"]) != reduction_mean or not context.is_sharded:
        return None
    gradient, local = context.position("grad_output"), context.operator(reduction=reduction_sum)

    def run(*tensors: Tensor) -> Any:
        filled = list(tensors)
        filled[gradient] = tensors[gradient] / whole
        return local(*filled)

    return run


_BUILDERS: dict[str, Builder] = {
    **dict.fromkeys(("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"), _reshape),
    **dict.fromkeys(
        (
            "aten.expand.default", "aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default",
            "aten.new_empty.default", "aten.full.default", "aten.zeros.default", "aten.ones.default",
            "aten.empty.memory_format",
        ),
        _sized("size"),
    ),
    **dict.fromkeys(("aten.slice_backward.default", "aten.select_backward.default"), _sized("input_sizes")),
    **dict.fromkeys(
        (
            f"aten.upsample_{kind}_backward.default"
            for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
        ),
        _sized("input_size"),
    ),
    **dict.fromkeys(("aten.new_empty_strided.default", "aten.empty_strided.default"), _strided_factory),
    **dict.fromkeys(("aten.arange.default", "aten.arange.start", "aten.arange.start_step"), _arange),
    **dict.fromkeys(("aten.addmm.default", "aten.baddbmm.default"), _summand("self", {"beta": 0})),
    **dict.fromkeys(
        (
            "aten.mse_loss_backward.default", "aten.smooth_l1_loss_backward.default",
            "aten.huber_loss_backward.default", "aten.binary_cross_entropy_backward.default",
        ),
        _mean_loss_backward,
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": local_attention.attention_forward,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": local_attention.attention_backward,
    "aten.as_strided.default": _as_strided,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._softmax.default": local_losses.softmax,
    "aten._log_softmax.default": local_losses.softmax,
    "aten._softmax_backward_data.default": local_losses.softmax_backward,
    "aten._log_softmax_backward_data.default": local_losses.log_softmax_backward,
    "aten.nll_loss_forward.default": local_losses.nll_loss_forward,
    "aten.nll_loss2d_forward.default": local_losses.nll_loss_forward,
    "aten.nll_loss_backward.default": local_losses.nll_loss_backward,
    "aten.nll_loss2d_backward.default": local_losses.nll_loss_backward,
}  # fmt: skip


def build_function(context: LocalContext) -> LocalFunction:
    """The function of the local tensor arguments that computes this rank's part of the operator."""
    drawn = random_operator(context)
    if drawn is not None:
        return drawn
    builder = _BUILDERS.get(str(context.call.target))
    built = builder(context) if builder is not None else None
    return built if built is not None else context.operator()


def build_local(
    call: OperatorCall,
    operator: Operator,
    graph: OperatorGraph,
    outputs: Sequence[Placement | None],
    inputs: Sequence[Placement],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    reducer: AxisReducer | None,
    seed: int | Tensor = 0,
    device: torch.device | None = None,
) -> LocalFunction:
    """The function of the local tensor arguments that runs ``operator`` on one rank.

    Constants (local sizes, offsets) are baked in; the function keeps no tensor. Where nothing special is
    needed it is a :class:`~planner.torch_adapter.local.context.LocalOperator`, whose ``call`` a graph builder
    may emit itself.

    Parameters
    ----------
    call, operator, graph
        The operator and its global tensors.
    outputs, inputs
        Placement per returned tensor (None where there is none) and per tensor argument.
    mesh, coordinate
        Size of each mesh axis and this rank's position on it.
    reducer
        Collectives of this rank; may be None for strategies without collectives.
    seed
        Key of random operators; a tensor of one int64 is read at every execution, so that each step may
        draw anew.
    device
        Device of tensors that are made from nothing (``arange``, ``full``); None for the traced one.

    Raises
    ------
    UnsupportedOperatorError
        For a random operator without a counter-based form, or a collective without a reducer.
    """
    output_specs = tuple(None if index is None else graph.values[index].spec for index in operator.outputs)
    context = LocalContext(
        call=call,
        input_specs=tuple(graph.values[index].spec for index in operator.inputs),
        output_specs=output_specs,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        mesh=tuple(mesh),
        coordinate=tuple(coordinate),
        reducer=reducer,
        seed=seed,
        stream=operator.index,
        device=device,
    )
    return build_function(context)


def run_local(
    call: OperatorCall,
    output_specs: Sequence[TensorSpec | None],
    tensors: Sequence[Tensor],
    input_specs: Sequence[TensorSpec],
    outputs: Sequence[Placement | None],
    inputs: Sequence[Placement],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    reducer: AxisReducer | None = None,
    seed: int | Tensor = 0,
) -> tuple[Any, ...]:
    """Run a call once on local tensors, outside any graph; see :func:`build_local`."""
    context = LocalContext(
        call, tuple(input_specs), tuple(output_specs), tuple(inputs), tuple(outputs), tuple(mesh), tuple(coordinate),
        reducer, seed,
    )  # fmt: skip
    result = build_function(context)(*tensors)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
