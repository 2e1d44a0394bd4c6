"""Reference inputs of an operator: small random tensors with valid labels and indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from planner.graph.operator_graph import TensorSpec
from planner.torch_adapter.local.calls import OperatorCall, Slot
from planner.torch_adapter.local.context import bind, call_with, torch_dtype
from planner.torch_adapter.rules.small_sizes import Shape, Sizes, Subject, contiguous_stride, small_sizes

_MAX_NUMEL = 1 << 20
_NARROW = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@dataclass(frozen=True)
class SmallInstance:
    """A call on small tensors; ``outputs`` are the shapes it must return where they are known."""

    call: OperatorCall
    named: dict[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[Shape | None, ...]


def small_instances(
    call: OperatorCall, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec | None], axis_size: int
) -> Iterator[SmallInstance]:
    """Instances of a call to check rules on, best first; the real sizes only where they are small too.

    Low-precision floating point becomes float32, in tensors and constants.
    """
    named = bind(call, len(inputs))
    subject = Subject(
        named,
        tuple(spec.shape for spec in inputs),
        tuple(None if spec is None else spec.shape for spec in outputs),
        axis_size,
    )
    for sizes in (small_sizes(str(call.target), subject), Sizes(subject.inputs, subject.outputs, {})):
        if sizes is None or _numel(sizes) > _MAX_NUMEL:
            continue
        constants = tree_map_only(torch.dtype, lambda dtype: _NARROW.get(dtype, dtype), {**named, **sizes.constants})
        specs = tuple(
            TensorSpec(
                shape, contiguous_stride(shape), "float32" if spec.dtype in ("bfloat16", "float16") else spec.dtype
            )
            for shape, spec in zip(sizes.inputs, inputs, strict=True)
        )
        yield SmallInstance(call_with(call.target, constants), constants, specs, sizes.outputs)


def _numel(sizes: Sizes) -> int:
    return sum(prod(shape) for shape in (*sizes.inputs, *sizes.outputs) if shape is not None)


def reference_inputs(instance: SmallInstance, positive: bool) -> list[Tensor]:
    """Random tensors for an instance, the same ones every time.

    ``positive`` draws floating point from (0.5, 1.5), for operators that are undefined below zero.
    """
    generator = torch.Generator().manual_seed(1)
    limits = _index_limits(instance)
    return [_tensor(spec, limits.get(position), positive, generator) for position, spec in enumerate(instance.inputs)]


@dataclass(frozen=True)
class _Limit:
    """Valid values of an integer tensor: below ``size``, distinct along ``distinct``, one of them ``ignored``."""

    size: int
    distinct: int | None = None
    ignored: int | None = None


def _tensor(spec: TensorSpec, limit: _Limit | None, positive: bool, generator: torch.Generator) -> Tensor:
    dtype = torch_dtype(spec.dtype)
    if dtype is torch.bool:
        return torch.rand(spec.shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        noise = torch.rand if positive else torch.randn
        return noise(spec.shape, generator=generator).to(dtype) + (0.5 if positive else 0.0)
    if dtype.is_complex:
        return torch.randn(spec.shape, generator=generator, dtype=dtype)
    if limit is None:
        return torch.randint(1, 6, spec.shape, generator=generator).to(dtype)
    if limit.distinct is not None and spec.shape:
        order = torch.rand(spec.shape, generator=generator).argsort(limit.distinct)
        return (order % max(limit.size, 1)).to(dtype)
    values = torch.randint(0, max(limit.size, 1), spec.shape, generator=generator).to(dtype)
    if limit.ignored is not None and values.numel() > 1:
        values.view(-1)[0] = limit.ignored
    return values


def _index_limits(instance: SmallInstance) -> dict[int, _Limit]:
    """Limits of the integer tensors of operators that look things up, by position."""
    named, target = instance.named, instance.call.target
    name = target._schema.name.removeprefix("aten::")

    def shape(argument: str) -> Shape:
        slot = named[argument]
        assert isinstance(slot, Slot)
        return instance.inputs[slot.position].shape

    if name == "embedding":
        return {named["indices"].position: _Limit(shape("weight")[0])}
    if name == "embedding_dense_backward":
        return {named["indices"].position: _Limit(named["num_weights"])}
    if name.startswith("nll_loss"):
        classes = shape("self")[1 if len(shape("self")) > 1 else 0]
        return {named["target"].position: _Limit(classes, ignored=named["ignore_index"])}
    if name in ("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy"):
        rank = max(len(shape("self")), 1)
        dim = named["dim"] % rank
        distinct = dim if name.startswith("scatter") else 0 if name == "index_copy" else None
        return {named["index"].position: _Limit(shape("self")[dim] if shape("self") else 1, distinct)}
    if name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put"):
        return {
            index.position: _Limit(shape("self")[dim], _longest(instance.inputs[index.position].shape))
            for dim, index in enumerate(named["indices"])
            if isinstance(index, Slot)
        }
    if name.startswith("max_pool") and name.endswith("backward"):
        rank = len(named["kernel_size"])
        return {named["indices"].position: _Limit(prod(shape("self")[-rank:]))}
    return {}


def _longest(shape: Shape) -> int | None:
    return max(range(len(shape)), key=lambda dim: shape[dim]) if shape else None
