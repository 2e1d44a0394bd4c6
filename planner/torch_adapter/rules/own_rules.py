"""Sharding rules that DTensor lacks, or that hold only because operators run on local tensors here.

A table of functions from a request (one operator's tensor shapes and constants) to rows of axis placements. The
planner reads them through DTensor, see :mod:`planner.torch_adapter.rules.registration`. Every row is checked
numerically before its use, by :mod:`planner.torch_adapter.rules.verification`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from planner.torch_adapter.local.calls import OperatorCall, Slot
from planner.torch_adapter.local.context import bind
from planner.torch_adapter.rules.small_sizes import Shape

Row = tuple[tuple[str, ...], tuple[str, ...]]
"""Axis placements of the outputs and of the tensor arguments on one mesh axis."""

Rows = Iterator[Row]


@dataclass(frozen=True)
class RuleRequest:
    """One operator: its call, the shapes of its tensor arguments in order, and the size of the mesh axis."""

    call: OperatorCall
    shapes: tuple[Shape, ...]
    axis_size: int

    @cached_property
    def named(self) -> dict[str, Any]:
        """Arguments by schema name, tensors as :class:`~planner.torch_adapter.local.calls.Slot`; do not change it."""
        return bind(self.call, len(self.shapes))

    @property
    def output_count(self) -> int:
        """Outputs of the operator's schema, the ones that this call leaves out included."""
        return len(self.call.target._schema.returns)

    def has(self, name: str) -> bool:
        """Whether the argument called ``name`` is a tensor of this call."""
        return isinstance(self.named.get(name), Slot)

    def shape(self, name: str) -> Shape:
        """Shape of a tensor argument."""
        slot = self.named[name]
        assert isinstance(slot, Slot)
        return self.shapes[slot.position]

    def row(self, outputs: Sequence[str] | str, /, **placements: str) -> Row:
        """A row from axis placements by argument name; tensors that are not named are replicated.

        ``outputs`` given as one axis placement stands for every output.
        """
        inputs = ["R"] * len(self.shapes)
        for name, entry in placements.items():
            if self.has(name):
                inputs[self.named[name].position] = entry
        per_output = [outputs] * self.output_count if isinstance(outputs, str) else outputs
        return tuple(per_output), tuple(inputs)


def _pointwise(request: RuleRequest) -> Rows:
    """Shard any dimension of the result; inputs broadcast over dimensions they lack or have once."""
    result = np.broadcast_shapes(*request.shapes)
    for dim in range(len(result)):
        inputs = tuple(_broadcast_placement(shape, result, dim) for shape in request.shapes)
        yield (f"S{dim}",) * request.output_count, inputs


def _broadcast_placement(shape: Sequence[int], result: Sequence[int], dim: int) -> str:
    """Axis placement of a tensor that broadcasts to a ``result`` that is sharded on ``dim``."""
    own = dim - (len(result) - len(shape))
    return f"S{own}" if own >= 0 and shape[own] == result[dim] else "R"


def _dropout(request: RuleRequest) -> Rows:
    yield from _pointwise(request)
    yield request.row(["Psum", "R"], input="Psum")  # linear once the mask is given


def _factory(request: RuleRequest) -> Rows:
    for dim in range(len(request.named.get("size", ()))):
        yield request.row(f"S{dim}")


def _arange(request: RuleRequest) -> Rows:
    dtype = request.named["dtype"]
    bounds = [request.named[name] for name in ("start", "end", "step") if name in request.named]
    integers = all(isinstance(bound, int) for bound in bounds) if dtype is None else not dtype.is_floating_point
    if integers:  # a block of a float range may round differently
        yield request.row("S0")


def _expand(request: RuleRequest) -> Rows:
    """Expanded dimensions can be sharded with a replicated source, at no cost."""
    source, sizes = request.shape("self"), request.named["size"]
    lead = len(sizes) - len(source)
    for dim, size in enumerate(sizes):
        if dim < lead or size not in (-1, source[dim - lead]):
            yield request.row(f"S{dim}")


def _matrix_sum(request: RuleRequest) -> Rows:
    """Inner dimension sharded, the summand replicated and added by one rank (row-parallel with bias)."""
    inner = {
        "aten.addmm.default": ("mat1", "S1", "mat2", "S0"),
        "aten.baddbmm.default": ("batch1", "S2", "batch2", "S1"),
    }
    left, left_shard, right, right_shard = inner[str(request.call.target)]
    yield request.row("Psum", **{left: left_shard, right: right_shard})


def _embedding(request: RuleRequest) -> Rows:
    yield request.row("Psum", weight="S0")


def _embedding_backward(request: RuleRequest) -> Rows:
    yield request.row("S0")


def _convolution(request: RuleRequest) -> Rows:
    out_dim, in_dim = ("S1", "S0") if request.named["transposed"] else ("S0", "S1")
    yield request.row("S0", input="S0")
    if int(request.named["groups"]) == 1:
        yield request.row("S1", weight=out_dim, bias="S0")
        yield request.row("Psum", input="S1", weight=in_dim)
    elif int(request.named["groups"]) % request.axis_size == 0:
        yield request.row("S1", input="S1", weight="S0", bias="S0")


def _convolution_backward(request: RuleRequest) -> Rows:
    out_dim, in_dim = ("S1", "S0") if request.named["transposed"] else ("S0", "S1")
    yield request.row(["S0", "Psum", "Psum"], grad_output="S0", input="S0")
    if int(request.named["groups"]) == 1:
        yield request.row(["Psum", out_dim, "S0"], grad_output="S1", weight=out_dim)
        yield request.row(["S1", in_dim, "R"], input="S1", weight=in_dim)
    elif int(request.named["groups"]) % request.axis_size == 0:
        yield request.row(["S1", "S0", "S0"], grad_output="S1", input="S1", weight="S0")


def _planes(request: RuleRequest) -> Rows:
    """Operators on planes: every tensor is (batch, channels, ...)."""
    ranks = {len(shape) for shape in request.shapes}
    if len(ranks) == 1 and min(ranks) >= 3:
        for dim in (0, 1):
            yield (f"S{dim}",) * request.output_count, (f"S{dim}",) * len(request.shapes)


def _group_norm(request: RuleRequest) -> Rows:
    yield request.row("S0", input="S0")
    if int(request.named["group"]) % request.axis_size == 0:
        yield request.row("S1", input="S1", weight="S0", bias="S0")


def _group_norm_backward(request: RuleRequest) -> Rows:
    yield request.row(["S0", "Psum", "Psum"], grad_out="S0", input="S0", mean="S0", rstd="S0")
    if int(request.named["group"]) % request.axis_size == 0:
        yield request.row(["S1", "S0", "S0"], grad_out="S1", input="S1", mean="S1", rstd="S1", weight="S0")


def _batch_norm(request: RuleRequest) -> Rows:
    """Channels; in training the batch's statistics need the whole batch."""
    per_channel = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "S0")
    channels = ["S1"] + ["S0"] * (request.output_count - 1)
    yield request.row(channels, input="S1", **per_channel)
    if not request.named.get("training", False):
        yield request.row(["S0"] + ["R"] * (request.output_count - 1), input="S0")


def _batch_norm_backward(request: RuleRequest) -> Rows:
    names = ("weight", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")
    yield request.row(["S1", "S0", "S0"], grad_out="S1", input="S1", **dict.fromkeys(names, "S0"))


def _softmax(request: RuleRequest) -> Rows:
    """The reduced dimension sharded: ranks exchange one maximum and one sum per row."""
    sharded = f"S{_reduced_dim(request, 'self')}"
    yield request.row(sharded, self=sharded)


def _softmax_backward(request: RuleRequest) -> Rows:
    """The reduced dimension sharded: ranks exchange one sum per row."""
    sharded = f"S{_reduced_dim(request, 'output')}"
    yield request.row(sharded, grad_output=sharded, output=sharded)


def _reduced_dim(request: RuleRequest, name: str) -> int:
    return int(request.named["dim"]) % max(len(request.shape(name)), 1)


def _nll_loss(request: RuleRequest) -> Rows:
    if request.named.get("weight") is not None:
        return
    batched = len(request.shape("self")) > 1
    yield request.row(["Psum", "R"], self="S1" if batched else "S0")
    if batched and int(request.named["reduction"]) == 1:
        # the mean divides by the counted rows of all ranks, so that ignored labels count nowhere
        yield request.row(["Psum", "R"], self="S0", target="S0")


def _nll_loss_backward(request: RuleRequest) -> Rows:
    if request.named.get("weight") is None:
        class_shard = "S1" if len(request.shape("self")) > 1 else "S0"
        yield request.row(class_shard, self=class_shard)


def _mean_loss(request: RuleRequest) -> Rows:
    for dim in range(len(request.shape("self"))):
        output = {0: f"S{dim}", 1: "Pavg", 2: "Psum"}[int(request.named["reduction"])]
        yield request.row(output, self=f"S{dim}", target=f"S{dim}")


def _mean_loss_backward(request: RuleRequest) -> Rows:
    whole = len(request.shape("grad_output")) > 0
    for dim in range(len(request.shape("self"))):
        sharded = f"S{dim}"
        yield request.row(sharded, grad_output=sharded if whole else "R", self=sharded, target=sharded)


def _rms_norm(request: RuleRequest) -> Rows:
    """Rows whole, with the weight."""
    for dim in _batch_dims(request):
        yield request.row(f"S{dim}", input=f"S{dim}")


def _rms_norm_backward(request: RuleRequest) -> Rows:
    for dim in _batch_dims(request):
        yield request.row([f"S{dim}", "Psum"], gradient=f"S{dim}", input=f"S{dim}", scale=f"S{dim}")
    yield request.row("Psum", gradient="Psum")


def _batch_dims(request: RuleRequest) -> range:
    return range(len(request.shape("input")) - len(request.shape("weight")))


def _attention(request: RuleRequest) -> Rows:
    """Batch and heads; a head's rows and columns stay together, and a mask broadcasts where its size is one."""
    for dim in (0, 1):
        inputs = [f"S{dim}"] * len(request.shapes)
        if request.has("attn_mask"):
            mask = request.shape("attn_mask")
            inputs[request.named["attn_mask"].position] = f"S{dim}" if len(mask) == 4 and mask[dim] > 1 else "R"
        yield (f"S{dim}",) * request.output_count, tuple(inputs)


def _index(request: RuleRequest) -> Rows:
    """Dimensions that no index touches; the dimensions of the indices, with the source replicated."""
    for source_dim, result_dim in _untouched(request):
        yield request.row(f"S{result_dim}", self=f"S{source_dim}")
    first, block = _indexed_block(request)
    for dim in range(len(block)):
        inputs = tuple(_broadcast_placement(shape, block, dim) for shape in request.shapes[1:])
        yield (f"S{first + dim}",), ("R", *inputs)


def _index_put(request: RuleRequest) -> Rows:
    """Dimensions that no index touches."""
    source, values = request.shape("self"), request.shape("values")
    indices = [slot for slot in request.named["indices"] if slot is not None]
    indexed_rank = len(source) - len(indices) + len(_indexed_block(request)[1])
    for source_dim, result_dim in _untouched(request):
        own = result_dim - (indexed_rank - len(values))
        follows = own >= 0 and values[own] == source[source_dim]
        yield request.row(f"S{source_dim}", self=f"S{source_dim}", values=f"S{own}" if follows else "R")


def _indexed_block(request: RuleRequest) -> tuple[int, Shape]:
    """First dimension that the indices make in an indexing's result, and the sizes that they make there."""
    slots = {dim: slot for dim, slot in enumerate(request.named["indices"]) if slot is not None}
    at = list(slots)
    adjacent = at == list(range(at[0], at[0] + len(at)))
    block = np.broadcast_shapes(*(request.shapes[slot.position] for slot in slots.values()))
    return (at[0] if adjacent else 0), block


def _untouched(request: RuleRequest) -> Iterator[tuple[int, int]]:
    """Dimensions of the source without an index, and where they are in an indexing's result."""
    indices = request.named["indices"]
    first, block = _indexed_block(request)
    passed = 0
    for dim in range(len(request.shape("self"))):
        if dim < len(indices) and indices[dim] is not None:
            continue
        yield dim, passed if passed < first else passed + len(block)
        passed += 1


_PLANES = (
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
    "max_pool3d_with_indices", "max_pool3d_with_indices_backward", "avg_pool3d", "avg_pool3d_backward",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "reflection_pad2d", "reflection_pad2d_backward",
    *(
        f"upsample_{kind}{end}"
        for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
        for end in ("", "_backward")
    ),
)  # fmt: skip
_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
_BATCH_NORM = (
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update_functional", "native_batch_norm",
)  # fmt: skip
_FACTORIES = ("full", "zeros", "ones", "rand", "randn", "randint", "empty_strided", "new_zeros", "new_ones", "new_full")

OwnRule = Callable[[RuleRequest], Rows]

_OWN_RULES: dict[str, OwnRule] = {
    **{f"aten.{name}.default": _planes for name in _PLANES},
    **{f"aten.{name}.default": _factory for name in _FACTORIES},
    **{f"aten.{name}.default": _mean_loss for name in _LOSSES},
    **{f"aten.{name}_backward.default": _mean_loss_backward for name in _LOSSES},
    **{f"aten.{name}.default": _batch_norm for name in _BATCH_NORM},
    "aten.empty.memory_format": _factory,
    "aten.randint.low": _factory,
    "aten.scalar_tensor.default": _factory,
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.expand.default": _expand,
    "aten.addmm.default": _matrix_sum,
    "aten.baddbmm.default": _matrix_sum,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.batch_norm_backward.default": _batch_norm_backward,
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax_backward_data.default": _softmax_backward,
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss2d_forward.default": _nll_loss,
    "aten.nll_loss_backward.default": _nll_loss_backward,
    "aten.nll_loss2d_backward.default": _nll_loss_backward,
    "meshwright.rms_norm.default": _rms_norm,
    "meshwright.rms_norm_backward.default": _rms_norm_backward,
    "aten.native_dropout.default": _dropout,
    "aten.bernoulli.p": _pointwise,
    "aten.bernoulli.default": _pointwise,
    "aten.copy.default": _pointwise,
    "aten.fill.Tensor": _pointwise,
    "aten.floor_divide.default": _pointwise,
    "aten.lift_fresh_copy.default": _pointwise,
    "aten.softplus_backward.default": _pointwise,
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention,
}


def own_rule(target: torch._ops.OpOverload) -> OwnRule | None:
    """Our own rule of an operator, None where there is none.

    Operators that torch tags as pointwise need no entry.
    """
    if torch.Tag.pointwise in target.tags and len(target._schema.returns) == 1:
        return _OWN_RULES.get(str(target), _pointwise)
    return _OWN_RULES.get(str(target))
