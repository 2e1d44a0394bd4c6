"""Candidate rules from DTensor's tables, for one mesh axis.

DTensor keeps two kinds of tables: functions that list the rows of one axis, and functions that return
the strategies for given input placements. The latter are called with every combination of input placements,
except those that ``register_sharding`` put there: these list the rows of one axis whatever their input.
No process group is needed, and the redistribution costs that DTensor computes while it enumerates
(the bulk of its time) are left out: this planner has its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice, product
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor.experimental import _register_sharding

from planner.graph.axis_rule import AxisRule
from planner.graph.operator_graph import TensorSpec
from planner.graph.placement import REPLICATE
from planner.torch_adapter.local.calls import OperatorCall
from planner.torch_adapter.local.context import torch_dtype
from planner.torch_adapter.local.operator_collectives import local_collectives

_MAX_COMBINATIONS = 256
_RULE_MODULES = ("utils", "_math_ops", "_matrix_ops", "_tensor_ops", "_view_ops", "_pointwise_ops", "_conv_ops")
_REDUCTIONS = {"sum": "Psum", "avg": "Pavg", "max": "Pmax", "min": "Pmin"}


def dtensor_candidates(
    call: OperatorCall, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec | None], axis_size: int
) -> tuple[AxisRule, ...] | None:
    """Rules that DTensor's tables list for one operator with tensor arguments, None where it is in no table.

    Rows with placements that this planner lacks (strided shards, products) are left out. Divisibility is
    not checked here.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    rows_of_axis = getattr(propagator, "op_single_dim_strategy_funcs", {}).get(call.target)
    strategy = propagator.op_strategy_funcs.get(call.target)
    if rows_of_axis is not None:
        rows = _listed_rows(rows_of_axis, call, inputs, outputs)
    elif strategy is not None:
        with _rows_only():
            rows = list(_strategy_rows(strategy, call, inputs, axis_size))
    else:
        return None
    rules = (_rule_of_row(row, call, inputs, outputs) for row in rows)
    return tuple(dict.fromkeys(rule for rule in rules if rule is not None))


Row = tuple[list[Any], list[Any]]


def _rule_of_row(
    row: Row, call: OperatorCall, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec | None]
) -> AxisRule | None:
    row_out, row_in = row
    if len(row_in) != len(inputs):
        return None
    if len(row_out) != len(outputs):  # one spec for a list of tensors
        if len(row_out) != 1:
            return None
        row_out = row_out * len(outputs)
    # a masked partial is computed by a masked lookup on plain local tensors
    lookup = "embedding" in str(call.target)
    placed_in = [_axis_placement(placement, masked=REPLICATE if lookup else None) for placement in row_in]
    placed_out = [
        None if spec is None else _axis_placement(placement, masked="Psum" if lookup else None)
        for placement, spec in zip(row_out, outputs, strict=True)
    ]
    if None in placed_in or any(
        entry is None and spec is not None for entry, spec in zip(placed_out, outputs, strict=True)
    ):
        return None
    inputs_known = tuple(entry for entry in placed_in if entry is not None)
    return AxisRule(tuple(placed_out), inputs_known, local_collectives(call, inputs, outputs, inputs_known))


def _axis_placement(placement: Any, masked: str | None) -> str | None:
    """Axis placement of a torch placement; None where there is none for it."""
    kind = type(placement).__name__
    if kind in ("Shard", "_ShardingPlaceholder"):
        return f"S{placement.dim}" if placement.dim >= 0 else None
    if kind == "Replicate":
        return REPLICATE
    if kind in ("_MaskPartial", "MaskPartial"):
        return masked
    if kind == "Partial":
        return _REDUCTIONS.get(placement.reduce_op)
    return None


def _listed_rows(
    function: Any, call: OperatorCall, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec | None]
) -> list[Row]:
    args, kwargs = _positional(call, [_meta(spec) for spec in inputs])
    function = getattr(function, "func", function)
    rows = function(call.target, args, kwargs)
    count = max((len(row) for row in rows), default=0) - len(inputs)
    return [(list(row[:count]), list(row[count:])) for row in rows]


def _strategy_rows(
    function: Callable[[OpSchema], Any], call: OperatorCall, inputs: Sequence[TensorSpec], axis_size: int
) -> Iterator[Row]:
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(call.target)
    mesh = _mesh(axis_size)
    combinations = _combinations(inputs, axis_size)
    for placements in islice(combinations, 1) if _lists_rows(function) else combinations:
        strategies = [
            OpStrategy([OpSpec(DTensorSpec(mesh, (placement,), tensor_meta=_meta(spec)))])
            for placement, spec in zip(placements, inputs, strict=True)
        ]
        args, kwargs = _positional(call, strategies)
        schema = OpSchema(call.target, tuple(map(_tuple_strategy, args)), kwargs, schema_info=info)
        try:
            answer = function(schema)
        except (RuntimeError, ValueError, AssertionError, NotImplementedError, IndexError):
            continue  # the table refuses these placements
        answers: list[Any] = list(answer.children) if isinstance(answer, TupleStrategy) else [answer]
        for chosen in zip(*(strategy.strategies for strategy in answers), strict=True):
            specs = chosen[0].output_specs if len(chosen) == 1 else tuple(spec.output_specs for spec in chosen)
            row_out = list(specs) if isinstance(specs, tuple) else [specs]
            given = chosen[0].input_specs
            row_in = list(placements) if given is None else [spec.placements[0] for spec in given if spec is not None]
            yield [None if spec is None else spec.placements[0] for spec in row_out], row_in


def registered_by_user(target: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The function that the user passed to ``register_sharding`` for an operator; None for torch's own tables."""
    answer = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.get(target)
    return answer.args[0] if isinstance(answer, partial) and _lists_rows(answer) else None


def _lists_rows(function: Callable[[OpSchema], Any]) -> bool:
    """Whether ``register_sharding`` made the function."""
    return getattr(getattr(function, "func", None), "__module__", None) == _register_sharding.__name__


def _combinations(inputs: Sequence[TensorSpec], axis_size: int) -> Iterator[tuple[Any, ...]]:
    """Combinations of input placements; above :data:`_MAX_COMBINATIONS` first those with equal placements."""
    choices = []
    for spec in inputs:
        own: list[Any] = [Replicate()]
        own += [Shard(dim) for dim, size in enumerate(spec.shape) if size and size % axis_size == 0]
        own.append(Partial("sum"))
        if len(inputs) == 1:
            own += [Partial("avg"), Partial("max"), Partial("min")]
        choices.append(own)
    if prod(len(own) for own in choices) <= _MAX_COMBINATIONS:
        yield from product(*choices)
        return
    for placement in dict.fromkeys(placement for own in choices for placement in own):
        yield tuple(placement if placement in own else Replicate() for own in choices)
    yield from islice(product(*choices), _MAX_COMBINATIONS)


def _positional(call: OperatorCall, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as the tables expect them: positional ones filled up with their defaults."""
    args, kwargs = call.arguments(tensors)
    filled = list(args)
    missing = [item for item in call.target._schema.arguments if not item.kwarg_only][len(args) :]
    filled.extend(kwargs.pop(item.name) if item.name in kwargs else item.default_value for item in missing)
    return tuple(filled), kwargs


def _tuple_strategy(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)) and argument and all(isinstance(item, OpStrategy) for item in argument):
        return TupleStrategy(tuple(argument))
    return argument


def _meta(spec: TensorSpec) -> TensorMeta:
    return TensorMeta(torch.Size(spec.shape), spec.stride, torch_dtype(spec.dtype))


@cache
def _mesh(axis_size: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(axis_size), _init_backend=False, _rank=0)


@contextmanager
def _rows_only() -> Iterator[None]:
    """Leave redistribution costs and the check of sizes, which this planner reports, out of DTensor's tables."""
    replacements: dict[str, Callable[..., Any]] = {
        "generate_redistribute_costs": lambda source, target: [0.0] * len(source.strategies),
        "is_tensor_shardable": lambda *arguments, **options: True,
    }
    patched = []
    for module_name in _RULE_MODULES:
        module = importlib.import_module(f"torch.distributed.tensor._ops.{module_name}")
        for name, replacement in replacements.items():
            if hasattr(module, name):
                patched.append((module, name, getattr(module, name)))
                setattr(module, name, replacement)
    try:
        yield
    finally:
        for module, name, original in patched:
            setattr(module, name, original)
