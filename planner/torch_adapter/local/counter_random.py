"""Random operators that draw from a counter: the same numbers under any sharding and when recomputed.

Each element's bits are splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014) of its index in the global tensor and a key made from (seed, operator). Nothing is drawn
from torch's generators and no state is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from planner.torch_adapter.local.context import LocalContext, LocalFunction, UnsupportedOperatorError, torch_dtype
from planner.torch_adapter.local.operator_traits import draws_random_numbers

_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110685705
_CHUNK = 1 << 18  # elements whose counters are alive at once: 2 MiB each
GENERATED_FOR = ("cuda",)
"""Devices on which masks are generated code; on CPUs that needs a compiler and is not worth its time."""
_BITS = 53
_MANTISSA = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def _wrap(value: int) -> int:
    """``value`` modulo 2**64 as a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)).mul_(_MIX_1)
    bits = bits.bitwise_xor_(_shift_right(bits, 27)).mul_(_MIX_2)
    return bits.bitwise_xor_(_shift_right(bits, 31))


def _merged(shape: Sequence[int], starts: Sequence[int], whole: Sequence[int]) -> list[tuple[int, int, int]]:
    """Dimensions as (local size, start, global size), each joined with those after it that are not sharded."""
    dims = [(1, 0, 1)]
    for size, start, count in zip(reversed(shape), reversed(starts), reversed(whole), strict=True):
        local, _, total = dims[0]
        if local == total:
            dims[0] = (size * local, start * local, count * total)
        else:
            dims.insert(0, (size, start, count))
    return dims


class _Counter:
    """Counters of this rank's elements of output 0, chunk by chunk in the order of a contiguous tensor."""

    def __init__(self, context: LocalContext, draws: int = 1) -> None:
        spec = context.output_specs[0]
        assert spec is not None
        self.shape = context.output_shape()
        self.numel = prod(self.shape)
        self.dims = _merged(self.shape, context.output_starts(), spec.shape)
        self.draws = draws
        self.seed, self.stream = context.seed, context.stream
        self._numbers: Tensor | None = None

    def _key(self) -> int | Tensor:
        offset = _wrap(self.stream * 0x2545F4914F6CDD1D)
        if isinstance(self.seed, Tensor):
            return self.seed * _MIX_2 + offset
        return _wrap(self.seed * _MIX_2 + offset)

    def _global_index(self, start: int, stop: int, device: torch.device) -> Tensor:
        index = torch.arange(start, stop, device=device)
        if len(self.dims) == 1:
            return index.add_(self.dims[0][1])
        total = torch.zeros_like(index)
        inner, global_inner = 1, 1
        for size, first, whole in reversed(self.dims):
            position = index if inner == 1 else index.div(inner, rounding_mode="floor")
            total.add_((position % size).add_(first).mul_(global_inner))
            inner, global_inner = inner * size, global_inner * whole
        return total

    def fill(self, device: torch.device, consume: Callable[[int, int, list[Tensor]], None]) -> None:
        """Call ``consume(start, stop, draws)`` per chunk with integers uniform in [0, 2**53), one per draw."""
        key = self._key()
        for start in range(0, self.numel, _CHUNK):
            stop = min(start + _CHUNK, self.numel)
            index = self._global_index(start, stop, device).mul_(self.draws)
            consume(
                start, stop, [_shift_right(_mix((index + d) * _GOLDEN + key), 64 - _BITS) for d in range(self.draws)]
            )

    def generated_mask(self, device: torch.device, threshold: int) -> Tensor:
        """Mask of the elements whose integer is at least `threshold`, by one kernel that is generated for it.

        Chunk by chunk a tensor of 64 million elements would be thousands of launches.
        """
        if self._numbers is None:
            self._numbers = torch.tensor([*self.dims, (threshold, 0, 0)], device=device)
        key = torch.as_tensor(self._key(), dtype=torch.int64).to(device, non_blocking=True)
        return _generated()(self.numel, self._numbers, key).view(self.shape)


def _whole_mask(numel: int, numbers: Tensor, key: Tensor) -> Tensor:
    """As :meth:`_Counter.fill` with one draw, for all elements at once; the last row of `numbers` has the threshold.

    Sizes are the elements of a tensor, so that one kernel serves all tensors with as many dimensions.
    """
    index = torch.arange(numel, device=numbers.device)
    total = torch.zeros_like(index)
    inner = global_inner = torch.ones((), dtype=torch.int64, device=numbers.device)
    *dims, last = numbers.unbind()
    for size, first, whole in (dim.unbind() for dim in reversed(dims)):
        total = total + (index // inner % size + first) * global_inner
        inner, global_inner = size * inner, whole * global_inner
    bits = total * _GOLDEN + key
    for count, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits = (bits ^ ((bits >> count) & ((1 << (64 - count)) - 1))) * factor
    bits = bits ^ ((bits >> 31) & ((1 << 33) - 1))
    return ((bits >> (64 - _BITS)) & ((1 << _BITS) - 1)) >= last[0]


@cache
def _generated() -> Callable[..., Tensor]:
    """The mask as generated code, for any sizes."""
    return torch.compile(_whole_mask, dynamic=True, fullgraph=True)


def _threshold(probability: float) -> int:
    return round(probability * (1 << _BITS))


def _keep_mask(counter: _Counter, device: torch.device, threshold: int) -> Tensor:
    """Mask that is True where the element's integer is at least ``threshold``."""
    if device.type in GENERATED_FOR:
        return counter.generated_mask(device, threshold)
    mask = torch.empty(counter.shape, dtype=torch.bool, device=device)
    flat = mask.view(-1)

    def consume(start: int, stop: int, draws: list[Tensor]) -> None:
        torch.ge(draws[0], threshold, out=flat[start:stop])

    counter.fill(device, consume)
    return mask


def _dropout(context: LocalContext) -> LocalFunction:
    probability, train = float(context.named["p"]), context.named["train"]
    if train is False:
        return context.operator()
    counter, threshold = _Counter(context), _threshold(probability)
    scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)

    def dropout(tensor: Tensor) -> tuple[Tensor, Tensor]:
        mask = _keep_mask(counter, tensor.device, threshold)
        return (tensor * mask).mul_(scale), mask

    return dropout


def _bernoulli_scalar(context: LocalContext) -> LocalFunction:
    counter, threshold = _Counter(context), _threshold(1.0 - float(context.named["p"]))

    def bernoulli(tensor: Tensor) -> Tensor:
        return _keep_mask(counter, tensor.device, threshold).to(tensor.dtype)

    return bernoulli


def _bernoulli_tensor(context: LocalContext) -> LocalFunction:
    counter, source = _Counter(context), context.position("p" if context.has("p") else "self")

    def bernoulli(*tensors: Tensor) -> Tensor:
        probability = tensors[source].reshape(-1)
        result = torch.empty(counter.shape, dtype=tensors[0].dtype, device=tensors[0].device)
        flat = result.view(-1)

        def consume(start: int, stop: int, draws: list[Tensor]) -> None:
            uniform = draws[0].to(torch.float64).mul_(2.0**-_BITS)
            flat[start:stop] = uniform < probability[start:stop]

        counter.fill(result.device, consume)
        return result

    return bernoulli


def _sample(context: LocalContext, draws: int, transform: Callable[[list[Tensor]], Tensor]) -> LocalFunction:
    spec = context.output_specs[0]
    assert spec is not None
    counter, dtype = _Counter(context, draws), torch_dtype(spec.dtype)
    constant_device = context.device or context.named.get("device")

    def sample(*tensors: Tensor) -> Tensor:
        device = tensors[0].device if tensors else torch.device(constant_device or "cpu")
        result = torch.empty(counter.shape, dtype=dtype, device=device)
        flat = result.view(-1)

        def consume(start: int, stop: int, integers: list[Tensor]) -> None:
            flat[start:stop] = transform(integers)

        counter.fill(device, consume)
        return result

    return sample


def _unit(integers: Tensor) -> Tensor:
    """Uniform in (0, 1)."""
    return integers.to(torch.float64).add_(0.5).mul_(2.0**-_BITS)


def _normal(integers: list[Tensor]) -> Tensor:
    """Standard normal by Box and Muller (1958)."""
    radius = _unit(integers[0]).log_().mul_(-2.0).sqrt_()
    return radius.mul_(_unit(integers[1]).mul_(2.0 * math.pi).cos_())


def _uniform(context: LocalContext) -> LocalFunction:
    low, high = float(context.named.get("from", 0.0)), float(context.named.get("to", 1.0))
    spec = context.output_specs[0]
    assert spec is not None
    digits = _MANTISSA[spec.dtype]  # more digits would round up to the excluded upper end

    def transform(integers: list[Tensor]) -> Tensor:
        return (integers[0] >> (_BITS - digits)).to(torch.float64).mul_((high - low) * 2.0**-digits).add_(low)

    return _sample(context, 1, transform)


def _gaussian(context: LocalContext) -> LocalFunction:
    mean, deviation = float(context.named.get("mean", 0.0)), float(context.named.get("std", 1.0))
    return _sample(context, 2, lambda integers: _normal(integers).mul_(deviation).add_(mean))


def _integers(context: LocalContext) -> LocalFunction:
    low, high = int(context.named.get("low", 0)), int(context.named["high"])
    return _sample(context, 1, lambda integers: integers[0].remainder_(high - low).add_(low))


RANDOM_OPERATORS: dict[str, Callable[[LocalContext], LocalFunction]] = {
    "aten.native_dropout.default": _dropout,
    "aten.bernoulli.p": _bernoulli_scalar,
    "aten.bernoulli.default": _bernoulli_tensor,
    "aten.bernoulli.Tensor": _bernoulli_tensor,
    "aten.rand_like.default": _uniform,
    "aten.rand.default": _uniform,
    "aten.uniform.default": _uniform,
    "aten.randn_like.default": _gaussian,
    "aten.randn.default": _gaussian,
    "aten.normal_functional.default": _gaussian,
    "aten.randint.default": _integers,
    "aten.randint.low": _integers,
    "aten.randint_like.default": _integers,
    "aten.randint_like.low_dtype": _integers,
}


def random_operator(context: LocalContext) -> LocalFunction | None:
    """The counter-based local operator; None for an operator that draws nothing.

    Raises
    ------
    UnsupportedOperatorError
        For a random operator that has no counter-based form: ranks would disagree silently.
    """
    build = RANDOM_OPERATORS.get(str(context.call.target))
    if build is not None:
        return build(context)
    args, kwargs = context.call.arguments(context.input_specs)
    if draws_random_numbers(context.call.target, args, kwargs):
        raise UnsupportedOperatorError(without_counter_form(str(context.call.target)))
    return None


def without_counter_form(name: str) -> str:
    """Error message for a random operator that is not in :data:`RANDOM_OPERATORS`."""
    return (
        f"{name} draws random numbers and has no counter-based form: use one of "
        f"{', '.join(sorted(RANDOM_OPERATORS))} or remove it from the step"
    )
