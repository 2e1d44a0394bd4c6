"""Small sizes for the tensors and constants of one operator.

Properties that rules depend on are kept: which sizes are equal, their order, which of them the mesh axis divides,
and how sizes relate where an operator adds or multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod
from typing import Any

Shape = tuple[int, ...]
Scale = Callable[[int], int]
_SIZE_CONSTANTS = ("size", "shape", "input_sizes", "input_size", "num_weights", "normalized_shape")
_FEW = 3


@dataclass(frozen=True)
class Sizes:
    """Shapes of the tensors (an output is None where it is not known beforehand) and constants that change."""

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape | None, ...]
    constants: dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """An operator's constants by schema name, its shapes, and the size of the mesh axis."""

    named: dict[str, Any]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape | None, ...]
    axis_size: int

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of all tensors."""
        return [*self.inputs, *(shape for shape in self.outputs if shape is not None)]

    def few(self, size: int) -> int:
        """A small size: one and two stay, else even where the axis divides it and odd where not."""
        if size <= 2:
            return size
        return 4 if size % self.axis_size == 0 else _FEW


def small_sizes(target: str, subject: Subject) -> Sizes | None:
    """Small sizes of a call of ``target``; None where only the real ones will do."""
    return _BY_TARGET.get(target, in_order)(subject)


def contiguous_stride(shape: Shape) -> Shape:
    """Strides of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _order_map(sizes: Iterable[int], axis_size: int) -> dict[int, int]:
    """Order-preserving map to small sizes: even where the axis divides, else odd; up to two unchanged."""
    mapped: dict[int, int] = {}
    last = 2
    for size in sorted({size for size in sizes if size > 2}):
        last += 1
        last += last % 2 != (size % axis_size != 0)
        mapped[size] = last
    return mapped


def in_order(subject: Subject, special: Mapping[int, Scale] | None = None, min_rank: int = 0) -> Sizes:
    """Sizes mapped by value, in order; ``special`` overrides dimensions of tensors from some rank on."""
    special = special or {}
    named = subject.named
    constants = {name: named[name] for name in _SIZE_CONSTANTS if isinstance(named.get(name), (int, list, tuple))}
    shapes = [*subject.shapes, *((v,) if isinstance(v, int) else tuple(v) for v in constants.values())]
    ordinary = (
        size for shape in shapes for dim, size in enumerate(shape) if dim not in special or len(shape) < min_rank
    )
    mapped = _order_map(ordinary, subject.axis_size)

    def of(shape: Shape) -> Shape:
        return tuple(
            special[dim](size) if dim in special and len(shape) >= min_rank else mapped.get(size, size)
            for dim, size in enumerate(shape)
        )

    inputs = tuple(map(of, subject.inputs))
    changed: dict[str, Any] = {
        name: mapped.get(value, value) if isinstance(value, int) else list(of(tuple(value)))
        for name, value in constants.items()
    }
    if isinstance(named.get("stride"), (list, tuple)) and "size" in changed:
        changed["stride"] = list(contiguous_stride(tuple(changed["size"])))
    if isinstance(named.get("padding_idx"), int) and "num_weights" in changed:
        changed["padding_idx"] = min(named["padding_idx"], changed["num_weights"] - 1)
    if isinstance(named.get("index"), int):
        chosen = [*inputs, *(value for value in changed.values() if isinstance(value, list))]
        changed["index"] = min(named["index"], min(size for shape in chosen for size in shape) - 1)
    return Sizes(inputs, _each(of, subject.outputs), changed)


def _each(function: Callable[[Shape], Shape], shapes: Sequence[Shape | None]) -> tuple[Shape | None, ...]:
    return tuple(None if shape is None else function(shape) for shape in shapes)


def _unknown_outputs(subject: Subject) -> Sizes:
    """Operators that multiply sizes or pick how many."""
    sizes = in_order(subject)
    if isinstance(subject.named.get("k"), int):
        smallest = min(size for shape in sizes.inputs for size in shape)
        sizes.constants["k"] = min(subject.named["k"], smallest)
    return Sizes(sizes.inputs, (None,) * len(subject.outputs), sizes.constants)


def _planes(subject: Subject) -> Sizes:
    """Kernels and strides relate the sizes of a plane: only batch and channels shrink."""
    return in_order(subject, dict.fromkeys((2, 3, 4), lambda size: size), min_rank=3)


def _scale(values: Iterable[int], axis_size: int) -> Scale:
    """Scale that keeps sums: all values divided by a common factor, divisibility by the axis as parity."""
    known = {value for value in values if value > 0}
    factor = gcd(*known) if known else 1
    divided = [value for value in known if value % axis_size == 0]
    unit = next(
        (
            unit
            for unit in range(1, min(factor, 8) + 1)
            if all(value // factor * unit % 2 == 0 for value in divided) and max(known) // factor * unit > 2
        ),
        factor,
    )
    return lambda size: size if size <= 1 else size // factor * unit


def _along(subject: Subject, dim: int, min_rank: int, *names: str) -> Sizes:
    """Operators that add sizes along ``dim``, and the constants ``names`` that count along it."""
    along = [shape[dim] for shape in subject.shapes if len(shape) >= min_rank]
    longest = max(along)
    positions = {
        name: [_within(entry, longest) for entry in (value if isinstance(value, (list, tuple)) else [value])]
        for name in names
        if (value := subject.named.get(name)) is not None
    }
    scale = _scale([*along, *(entry for entries in positions.values() for entry in entries)], subject.axis_size)
    sizes = in_order(subject, {dim: scale}, min_rank)
    for name, entries in positions.items():
        is_list = isinstance(subject.named[name], (list, tuple))
        sizes.constants[name] = [scale(entry) for entry in entries] if is_list else scale(entries[0])
    return sizes


def _within(position: int, size: int) -> int:
    return min(position + size if position < 0 else position, size)


def _along_dim(*names: str) -> Callable[[Subject], Sizes | None]:
    def shrink(subject: Subject) -> Sizes | None:
        if subject.named.get("step", 1) != 1:
            return None
        rank = max(map(len, subject.shapes))
        return _along(subject, int(subject.named["dim"]) % rank, rank, *names)

    return shrink


def _padded(subject: Subject) -> Sizes:
    pad, rank = list(subject.named["pad"]), len(subject.inputs[0])
    special, changed = {}, list(pad)
    for pair in range(len(pad) // 2):
        dim, amounts = rank - 1 - pair, pad[2 * pair : 2 * pair + 2]
        if any(amounts):
            values = [shape[dim] for shape in subject.shapes]
            special[dim] = scale = _scale([*values, *map(abs, amounts)], subject.axis_size)
            changed[2 * pair : 2 * pair + 2] = [scale(abs(amount)) * (1 if amount > 0 else -1) for amount in amounts]
    sizes = in_order(subject, special)
    sizes.constants["pad"] = changed
    return sizes


def _viewed(subject: Subject) -> Sizes | None:
    """Views regroup sizes: the common factors of both groupings shrink, one by one."""
    source, result = subject.inputs[0], subject.outputs[0]
    assert result is not None
    ends = sorted({prod(shape[: dim + 1]) for shape in (source, result) for dim in range(len(shape))} | {1})
    if any(end == 0 or end % begin for begin, end in pairwise(ends)):
        return None
    small = {1: 1}
    for at, (begin, end) in enumerate(pairwise(ends)):
        atom = end // begin
        small[end] = small[begin] * (atom if atom <= 2 else subject.few(atom) + 2 * (at % 3))

    def of(shape: Shape) -> Shape:
        return tuple(small[prod(shape[: dim + 1])] // small[prod(shape[:dim])] for dim in range(len(shape)))

    name = "shape" if "shape" in subject.named else "size"
    return Sizes((of(source),), (of(result),), {name: list(of(result))})


def _attention(subject: Subject) -> Sizes:
    """Grouped heads: query heads are a multiple of key heads."""
    return _along(subject, 1, 3)


def _convolution(subject: Subject) -> Sizes:
    """Sizes from the formula of the convolution; groups shrink together with their channels."""
    named = subject.named
    at = named["input"].position
    source, weight = subject.inputs[at], subject.inputs[named["weight"].position]
    groups, transposed = int(named["groups"]), bool(named["transposed"])
    few_groups = subject.few(groups)
    inner = _channel(subject, source[1] // groups, groups)
    outer = _channel(subject, (weight[1] if transposed else weight[0] // groups), groups)
    kernel, batch = weight[2:], subject.few(source[0])
    plane, out_plane = [], []
    for size, width, stride, padding, dilation, extra in zip(
        source[2:], kernel, *(named[name] for name in ("stride", "padding", "dilation", "output_padding")), strict=True
    ):
        reach = dilation * (width - 1) + 1
        plane.append(min(size, _FEW if transposed else reach + 2 * stride))
        if transposed:
            out_plane.append((plane[-1] - 1) * stride - 2 * padding + reach + extra)
        else:
            out_plane.append((plane[-1] + 2 * padding - reach) // stride + 1)
    small_source = (batch, few_groups * inner, *plane)
    small_weight = (few_groups * inner, outer, *kernel) if transposed else (few_groups * outer, inner, *kernel)
    small_output = (batch, few_groups * outer, *out_plane)
    by_name = {"input": small_source, "weight": small_weight, "grad_output": small_output, "bias": small_output[1:2]}
    inputs = list(subject.inputs)
    for name, shape in by_name.items():
        if hasattr(named.get(name), "position"):
            inputs[named[name].position] = shape
    if "grad_output" in named:
        outputs: list[Shape | None] = [small_source, small_weight, small_output[1:2]]
    else:
        outputs = [small_output]
    known = [None if real is None else shape for real, shape in zip(subject.outputs, outputs, strict=True)]
    changed: dict[str, Any] = {"groups": few_groups}
    if named.get("bias_sizes") is not None:
        changed["bias_sizes"] = list(small_output[1:2])
    return Sizes(tuple(inputs), tuple(known), changed)


def _channel(subject: Subject, channels: int, groups: int) -> int:
    return subject.few(channels) if groups == 1 else min(channels, 2)


def _group_norm(subject: Subject) -> Sizes:
    named = subject.named
    source = subject.inputs[named["input"].position]
    groups = subject.few(int(named["group"]))
    batch, channels = subject.few(source[0]), groups * min(source[1] // int(named["group"]), 2)
    plane = tuple(min(size, _FEW) for size in source[2:])
    by_rank = {"mean": (batch, groups), "rstd": (batch, groups), "weight": (channels,), "bias": (channels,)}
    inputs = [(batch, channels, *plane)] * len(subject.inputs)
    for name, shape in by_rank.items():
        if hasattr(named.get(name), "position"):
            inputs[named[name].position] = shape
    changed = {"N": batch, "C": channels, "HxW": prod(plane), "group": groups}
    return Sizes(tuple(inputs), (None,) * len(subject.outputs), changed)


_PLANE_OPERATORS = (
    *(f"{kind}_pool{rank}d{end}" for kind in ("avg", "_adaptive_avg") for rank in (2, 3) for end in ("", "_backward")),
    *(f"max_pool{rank}d_with_indices{end}" for rank in (2, 3) for end in ("", "_backward")),
    *(f"adaptive_max_pool2d{end}" for end in ("", "_backward")),
    *(f"reflection_pad2d{end}" for end in ("", "_backward")),
    *(
        f"upsample_{kind}{end}"
        for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
        for end in ("", "_backward")
    ),
)
_BY_TARGET: dict[str, Callable[[Subject], Sizes | None]] = {
    **{f"aten.{name}.default": _planes for name in _PLANE_OPERATORS},
    **{f"aten.{name}.default": _viewed for name in ("view", "_unsafe_view", "reshape")},
    **{f"aten.{name}.default": _unknown_outputs for name in ("topk", "stack", "repeat", "sort", "unfold")},
    **{f"aten.arange.{name}": lambda subject: None for name in ("default", "start", "start_step")},
    **{f"aten.{name}.default": _convolution for name in ("convolution", "convolution_backward")},
    **{f"aten.{name}.default": _group_norm for name in ("native_group_norm", "native_group_norm_backward")},
    "aten.cat.default": _along_dim(),
    "aten.split.Tensor": _along_dim("split_size"),
    "aten.split_with_sizes.default": _along_dim("split_sizes"),
    "aten.slice.Tensor": _along_dim("start", "end"),
    "aten.slice_backward.default": _along_dim("start", "end"),
    "aten.slice_scatter.default": _along_dim("start", "end"),
    "aten.constant_pad_nd.default": _padded,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention,
}
