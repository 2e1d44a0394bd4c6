"""Sharding rules that DTensor lacks or that it does differently on local tensors.

A table of functions from a request (one operator's tensors and constants) to candidate rules. Nothing
here is believed as it stands: every candidate is checked by :mod:`planner.torch_adapter.rule_verification`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.axis_rule import AxisRule
from planner.operator_graph import TensorSpec
from planner.torch_adapter.attention_rules import ATTENTION_BACKWARD, ATTENTION_FORWARD, SHARDED_DIMS, mask_word
from planner.torch_adapter.calls import Slot

Candidates = Iterator[AxisRule]


@dataclass(frozen=True)
class RuleRequest:
    """One operator: its target, constants by schema name, tensors, and the size of the mesh axis."""

    target: Any
    named: dict[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec | None, ...]
    axis_size: int

    def has(self, name: str) -> bool:
        """Whether the argument called ``name`` is a tensor of this call."""
        return isinstance(self.named.get(name), Slot)

    def spec(self, name: str) -> TensorSpec:
        """Tensor of an argument."""
        slot = self.named[name]
        assert isinstance(slot, Slot)
        return self.inputs[slot.position]

    def rule(self, outputs: Sequence[str] | str, /, *collectives: tuple[str, int], **words: str) -> AxisRule:
        """A rule from words per argument name; tensors that are not named are replicated.

        ``outputs`` given as one word stands for every output.
        """
        inputs = ["R"] * len(self.inputs)
        for name, word in words.items():
            if self.has(name):
                inputs[self.named[name].position] = word
        per_output = [outputs] * len(self.outputs) if isinstance(outputs, str) else outputs
        words_out = tuple(None if spec is None else word for spec, word in zip(self.outputs, per_output, strict=True))
        return AxisRule(words_out, tuple(inputs), collectives)


def _pointwise(request: RuleRequest) -> Candidates:
    """Shard any dimension of the result; inputs broadcast over dimensions they lack or have once."""
    result = request.outputs[0]
    assert result is not None
    rank = len(result.shape)
    for dim in range(rank):
        inputs = []
        for spec in request.inputs:
            own = dim - (rank - len(spec.shape))
            inputs.append(f"S{own}" if own >= 0 and spec.shape[own] == result.shape[dim] else "R")
        yield AxisRule(tuple(None if spec is None else f"S{dim}" for spec in request.outputs), tuple(inputs))


def _dropout(request: RuleRequest) -> Candidates:
    yield from _pointwise(request)
    yield request.rule(["Psum", "R"], input="Psum")  # linear once the mask is given


def _factory(request: RuleRequest) -> Candidates:
    result = request.outputs[0]
    assert result is not None
    for dim in range(len(result.shape)):
        yield request.rule(f"S{dim}")


def _arange(request: RuleRequest) -> Candidates:
    result = request.outputs[0]
    assert result is not None
    if "int" in result.dtype:  # a block of a float range may round differently
        yield request.rule("S0")


def _expand(request: RuleRequest) -> Candidates:
    """Expanded dimensions shard for nothing: the source stays replicated."""
    result, source = request.outputs[0], request.inputs[0].shape
    assert result is not None
    lead = len(result.shape) - len(source)
    for dim, size in enumerate(result.shape):
        if dim < lead or source[dim - lead] != size:
            yield request.rule(f"S{dim}")


def _matrix_sum(request: RuleRequest) -> Candidates:
    """Inner dimension sharded, the summand replicated and added by one rank (row-parallel with bias)."""
    inner = {
        "aten.addmm.default": ("mat1", "S1", "mat2", "S0"),
        "aten.baddbmm.default": ("batch1", "S2", "batch2", "S1"),
    }
    left, left_word, right, right_word = inner[str(request.target)]
    yield request.rule("Psum", **{left: left_word, right: right_word})


def _embedding(request: RuleRequest) -> Candidates:
    yield request.rule("Psum", weight="S0")


def _embedding_backward(request: RuleRequest) -> Candidates:
    yield request.rule("S0")


def _convolution(request: RuleRequest) -> Candidates:
    out_dim, in_dim = ("S1", "S0") if request.named["transposed"] else ("S0", "S1")
    yield request.rule("S0", input="S0")
    if int(request.named["groups"]) == 1:
        yield request.rule("S1", weight=out_dim, bias="S0")
        yield request.rule("Psum", input="S1", weight=in_dim)
    elif int(request.named["groups"]) % request.axis_size == 0:
        yield request.rule("S1", input="S1", weight="S0", bias="S0")


def _convolution_backward(request: RuleRequest) -> Candidates:
    out_dim, in_dim = ("S1", "S0") if request.named["transposed"] else ("S0", "S1")
    yield request.rule(["S0", "Psum", "Psum"], grad_output="S0", input="S0")
    if int(request.named["groups"]) == 1:
        yield request.rule(["Psum", out_dim, "S0"], grad_output="S1", weight=out_dim)
        yield request.rule(["S1", in_dim, "R"], input="S1", weight=in_dim)
    elif int(request.named["groups"]) % request.axis_size == 0:
        yield request.rule(["S1", "S0", "S0"], grad_output="S1", input="S1", weight="S0")


def _planes(request: RuleRequest) -> Candidates:
    """Operators on planes: every tensor is (batch, channels, ...)."""
    if all(len(spec.shape) >= 3 for spec in request.inputs) and len({len(spec.shape) for spec in request.inputs}) == 1:
        for dim in (0, 1):
            yield AxisRule((f"S{dim}",) * len(request.outputs), (f"S{dim}",) * len(request.inputs))


def _group_norm(request: RuleRequest) -> Candidates:
    yield request.rule("S0", input="S0")
    if int(request.named["group"]) % request.axis_size == 0:
        yield request.rule("S1", input="S1", weight="S0", bias="S0")


def _group_norm_backward(request: RuleRequest) -> Candidates:
    yield request.rule(["S0", "Psum", "Psum"], grad_out="S0", input="S0", mean="S0", rstd="S0")
    if int(request.named["group"]) % request.axis_size == 0:
        yield request.rule(["S1", "S0", "S0"], grad_out="S1", input="S1", mean="S1", rstd="S1", weight="S0")


def _batch_norm(request: RuleRequest) -> Candidates:
    """Channels; in training the batch's statistics need the whole batch."""
    per_channel = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "S0")
    channels = ["S1"] + ["S0"] * (len(request.outputs) - 1)
    yield request.rule(channels, input="S1", **per_channel)
    if not request.named.get("training", False):
        yield request.rule(["S0"] + ["R"] * (len(request.outputs) - 1), input="S0")


def _batch_norm_backward(request: RuleRequest) -> Candidates:
    names = ("weight", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")
    yield request.rule(["S1", "S0", "S0"], grad_out="S1", input="S1", **dict.fromkeys(names, "S0"))


def _softmax(request: RuleRequest) -> Candidates:
    """The reduced dimension sharded: one maximum and one sum per row are all-reduced."""
    row, word = _rows(request, request.spec("self"))
    yield request.rule(word, ("all_reduce", row), ("all_reduce", row), self=word)


def _softmax_backward(request: RuleRequest) -> Candidates:
    row, word = _rows(request, request.spec("output"))
    yield request.rule(word, ("all_reduce", row), grad_output=word, output=word)


def _rows(request: RuleRequest, spec: TensorSpec) -> tuple[int, str]:
    """Bytes of one number per row, and the word that shards the reduced dimension."""
    result, dim = request.outputs[0], int(request.named["dim"]) % max(len(spec.shape), 1)
    assert result is not None
    size = spec.shape[dim] if spec.shape else 1
    return spec.numel // max(size, 1) * max(result.item_bytes, 4), f"S{dim}"


def _nll_loss(request: RuleRequest) -> Candidates:
    if request.named.get("weight") is not None:
        return
    scores = request.spec("self")
    class_word = "S1" if len(scores.shape) > 1 else "S0"
    yield request.rule(["Psum", "R"], self=class_word)
    if len(scores.shape) > 1 and int(request.named["reduction"]) == 1:
        # the mean divides by the counted rows of all ranks, so that ignored labels count nowhere
        yield request.rule(["Psum", "R"], ("all_reduce", scores.item_bytes), self="S0", target="S0")


def _nll_loss_backward(request: RuleRequest) -> Candidates:
    if request.named.get("weight") is None:
        class_word = "S1" if len(request.spec("self").shape) > 1 else "S0"
        yield request.rule(class_word, self=class_word)


def _mean_loss(request: RuleRequest) -> Candidates:
    for dim in range(len(request.spec("self").shape)):
        word = {0: f"S{dim}", 1: "Pavg", 2: "Psum"}[int(request.named["reduction"])]
        yield request.rule(word, self=f"S{dim}", target=f"S{dim}")


def _mean_loss_backward(request: RuleRequest) -> Candidates:
    whole = len(request.spec("grad_output").shape) > 0
    for dim in range(len(request.spec("self").shape)):
        word = f"S{dim}"
        yield request.rule(word, grad_output=word if whole else "R", self=word, target=word)


def _attention(request: RuleRequest) -> Candidates:
    for dim in SHARDED_DIMS:
        words = [f"S{dim}"] * len(request.inputs)
        if request.has("attn_mask"):
            words[request.named["attn_mask"].position] = mask_word(request.spec("attn_mask").shape, dim)
        yield AxisRule((f"S{dim}",) * len(request.outputs), tuple(words))


def _index(request: RuleRequest) -> Candidates:
    """Dimensions that no index touches; the dimensions of the indices, with the source replicated."""
    result = request.outputs[0]
    assert result is not None
    for source_dim, result_dim in _untouched(request, len(result.shape)):
        yield request.rule(f"S{result_dim}", self=f"S{source_dim}")
    first, added = _indexed_block(request, len(result.shape))
    for dim in range(added):
        words = ["R"]
        for spec in request.inputs[1:]:
            own = dim - (added - len(spec.shape))
            words.append(f"S{own}" if own >= 0 and spec.shape[own] == result.shape[first + dim] else "R")
        yield AxisRule((f"S{first + dim}",), tuple(words))


def _index_put(request: RuleRequest) -> Candidates:
    """Dimensions that no index touches."""
    source, values = request.spec("self").shape, request.spec("values").shape
    indices = [request.inputs[slot.position].shape for slot in request.named["indices"] if slot is not None]
    indexed_rank = len(source) - len(indices) + max(map(len, indices))
    for source_dim, result_dim in _untouched(request, indexed_rank):
        own = result_dim - (indexed_rank - len(values))
        follows = own >= 0 and values[own] == source[source_dim]
        yield request.rule(f"S{source_dim}", self=f"S{source_dim}", values=f"S{own}" if follows else "R")


def _indexed_block(request: RuleRequest, result_rank: int) -> tuple[int, int]:
    """First dimension that the indices make in an indexing's result, and how many they make."""
    at = [dim for dim, slot in enumerate(request.named["indices"]) if slot is not None]
    adjacent = at == list(range(at[0], at[0] + len(at)))
    return (at[0] if adjacent else 0), result_rank - (len(request.spec("self").shape) - len(at))


def _untouched(request: RuleRequest, result_rank: int) -> Iterator[tuple[int, int]]:
    """Dimensions of the source without an index, and where they are in an indexing's result."""
    indices = request.named["indices"]
    first, added = _indexed_block(request, result_rank)
    passed = 0
    for dim in range(len(request.spec("self").shape)):
        if dim < len(indices) and indices[dim] is not None:
            continue
        yield dim, passed if passed < first else passed + added
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

OWN_RULES: dict[str, Callable[[RuleRequest], Candidates]] = {
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
    "aten.native_dropout.default": _dropout,
    "aten.bernoulli.p": _pointwise,
    "aten.bernoulli.default": _pointwise,
    "aten.copy.default": _pointwise,
    "aten.fill.Tensor": _pointwise,
    "aten.lift_fresh_copy.default": _pointwise,
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    ATTENTION_FORWARD: _attention,
    ATTENTION_BACKWARD: _attention,
}


def own_candidates(request: RuleRequest) -> tuple[AxisRule, ...] | None:
    """Candidate rules of our own, None where the operator is in no table.

    Operators that torch tags as pointwise need no entry.
    """
    build = OWN_RULES.get(str(request.target))
    if build is None and torch.Tag.pointwise in request.target.tags and len(request.outputs) == 1:
        build = _pointwise
    return None if build is None else tuple(build(request))
