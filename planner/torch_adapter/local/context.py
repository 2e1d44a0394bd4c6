"""Inputs of a local operator's construction: its call, the global tensors, the placements, the rank's coordinate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.graph.operator_graph import TensorSpec
from planner.graph.placement import Placement, block_index, is_partial, is_shard, local_shape, shard_dim
from planner.torch_adapter.local.calls import OperatorCall, Slot

LocalFunction = Callable[..., Any]


class UnsupportedOperatorError(ValueError):
    """An operator that cannot run on shards under the given placements."""


class AxisReducer(Protocol):
    """All-reduce of this rank over one mesh axis."""

    def all_reduce(self, tensor: Tensor, op: str, axis: int) -> Tensor:
        """Reduction (``"sum"`` or ``"max"``) of ``tensor`` over mesh axis ``axis``; a new tensor."""
        ...


def bind(call: OperatorCall, count: int) -> dict[str, Any]:
    """Arguments of ``call`` by schema name, defaults included, its ``count`` tensors as :class:`Slot`."""
    args, kwargs = call.arguments([Slot(position) for position in range(count)])
    schema = call.target._schema.arguments
    named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    named.update(zip((argument.name for argument in schema), args, strict=False))
    named.update(kwargs)
    return named


def call_with(target: torch._ops.OpOverload, named: dict[str, Any]) -> OperatorCall:
    """A call of ``target`` with arguments given by schema name."""
    schema = target._schema.arguments
    args = tuple(named[argument.name] for argument in schema if not argument.kwarg_only)
    kwargs = {
        argument.name: named[argument.name]
        for argument in schema
        if argument.kwarg_only and not (argument.has_default_value() and named[argument.name] == argument.default_value)
    }
    return OperatorCall.from_template(target, args, kwargs)


@dataclass(frozen=True, slots=True)
class LocalOperator:
    """A torch operator with local constants baked in: a function of the local tensors only.

    A graph builder may emit ``call`` itself instead of this function. ``device`` replaces the traced
    device of factory calls.
    """

    call: OperatorCall
    device: torch.device | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        """Run on local tensors, in the order of ``Operator.inputs``."""
        args, kwargs = self.call.arguments(tensors, self.device)
        return self.call.target(*args, **kwargs)


@dataclass(frozen=True)
class LocalContext:
    """One operator on one rank.

    Parameters
    ----------
    call
        The global call.
    input_specs, output_specs
        Global tensors; None where the operator returns none.
    inputs, outputs
        Their placements.
    mesh, coordinate
        Size of each axis, position of this rank on it.
    reducer
        Collectives of this rank; None where the strategy has none.
    seed, stream
        Random operators draw from (seed, stream, global element index). ``seed`` may be a tensor of one
        int64 that is read at every execution.
    device
        Device of tensors that are made from nothing; None for the traced one.
    """

    call: OperatorCall
    input_specs: tuple[TensorSpec, ...]
    output_specs: tuple[TensorSpec | None, ...]
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    reducer: AxisReducer | None = None
    seed: int | Tensor = 0
    stream: int = 0
    device: torch.device | None = None

    @cached_property
    def named(self) -> dict[str, Any]:
        """Arguments by schema name, tensors as :class:`Slot`; do not change it."""
        return bind(self.call, len(self.input_specs))

    def position(self, name: str) -> int:
        """Position among the tensor arguments of the argument called ``name``."""
        argument = self.named[name]
        if not isinstance(argument, Slot):
            raise UnsupportedOperatorError(f"{self.call.target}: argument {name!r} is no tensor")
        return argument.position

    def has(self, name: str) -> bool:
        """Whether the argument called ``name`` is a tensor of this call."""
        return isinstance(self.named.get(name), Slot)

    def spec(self, name: str) -> TensorSpec:
        """Global tensor of an argument."""
        return self.input_specs[self.position(name)]

    def placement(self, name: str) -> Placement:
        """Placement of an argument."""
        return self.inputs[self.position(name)]

    def input_shape(self, name: str) -> tuple[int, ...]:
        """Local shape of an argument."""
        return local_shape(self.spec(name).shape, self.placement(name), self.mesh)

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Local shape of an output."""
        spec, placement = self.output_specs[index], self.outputs[index]
        if spec is None or placement is None:
            raise UnsupportedOperatorError(f"{self.call.target}: output {index} is no tensor")
        return local_shape(spec.shape, placement, self.mesh)

    def axes_of(self, name: str, dim: int) -> tuple[int, ...]:
        """Mesh axes that shard dimension ``dim`` of an argument."""
        return tuple(
            axis for axis, entry in enumerate(self.placement(name)) if is_shard(entry) and shard_dim(entry) == dim
        )

    def block_start(self, name: str, dim: int) -> int:
        """Global index at which this rank's block of dimension ``dim`` of an argument starts."""
        block = block_index(self.coordinate, self.placement(name), self.mesh, dim)
        return block * self.input_shape(name)[dim]

    def output_starts(self, index: int = 0) -> tuple[int, ...]:
        """Global index at which this rank's block of an output starts, per dimension."""
        shape, placement = self.output_shape(index), self.outputs[index]
        assert placement is not None
        return tuple(block_index(self.coordinate, placement, self.mesh, dim) * size for dim, size in enumerate(shape))

    @property
    def is_sharded(self) -> bool:
        """Whether any tensor is sharded on any axis that has more than one rank."""
        placements = [*self.inputs, *(placement for placement in self.outputs if placement is not None)]
        return any(
            is_shard(entry) and self.mesh[axis] > 1 for placed in placements for axis, entry in enumerate(placed)
        )

    def adds_here(self, name: str) -> bool:
        """Whether this rank adds the replicated summand ``name`` to an output that is a pending sum.

        Every rank adding it would count it once per rank, so only the first rank of each such axis does.
        """
        output = self.outputs[0]
        assert output is not None
        return all(
            coordinate == 0 or entry != "Psum" or is_partial(summand)
            for coordinate, entry, summand in zip(self.coordinate, output, self.placement(name), strict=True)
        )

    def all_reduce(self, tensor: Tensor, op: str, axes: Sequence[int]) -> Tensor:
        """All-reduce over several axes, one after another."""
        for axis in axes:
            if self.reducer is None:
                raise UnsupportedOperatorError(
                    f"{self.call.target} needs an all-reduce on mesh axis {axis}: pass a reducer"
                )
            tensor = self.reducer.all_reduce(tensor, op, axis)
        return tensor

    def operator(self, target: torch._ops.OpOverload | None = None, /, **changes: Any) -> LocalOperator:
        """The call with some constants changed (by schema name), as a function of the local tensors."""
        if target is None and not changes:
            return LocalOperator(self.call, self.device)
        return LocalOperator(call_with(target or self.call.target, {**self.named, **changes}), self.device)


def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype called ``name`` (without ``torch.``)."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
