"""Numerical verification of sharding rules before their use.

Reference tensors are split by the placements of a rule, the local operators of all simulated ranks run, and their
joined results are compared with the operator on the whole tensors. No process group is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.graph.axis_rule import AxisRule
from planner.graph.operator_graph import TensorSpec
from planner.graph.placement import Placement
from planner.torch_adapter.local.calls import OperatorCall
from planner.torch_adapter.local.context import torch_dtype
from planner.torch_adapter.local.counter_random import RANDOM_OPERATORS
from planner.torch_adapter.local.operators import run_local
from planner.torch_adapter.rules.reference_inputs import SmallInstance, reference_inputs, small_instances
from planner.torch_adapter.rules.simulated_ranks import ThreadReducer, compare, join, run_ranks, split

CHECKED_MESH = (2,)
"""Simulated ranks; whether a rule is right does not depend on their number."""
_REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError)


def verified_rules(
    call: OperatorCall,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec | None],
    candidates: Iterable[AxisRule],
    axis_size: int,
) -> tuple[AxisRule, ...]:
    """The candidates that reproduce the operator on a small instance of the call."""
    reference = make_reference(call, inputs, outputs, axis_size)
    if reference is None:
        return ()
    return tuple(rule for rule in candidates if rule_failure(reference, rule) is None)


@dataclass(frozen=True)
class Reference:
    """An instance of an operator, its inputs and its results."""

    instance: SmallInstance
    tensors: tuple[Tensor, ...]
    results: tuple[Tensor | None, ...]

    @property
    def output_specs(self) -> tuple[TensorSpec | None, ...]:
        """The results' global specs."""
        return tuple(None if result is None else _spec_of(result) for result in self.results)


def make_reference(
    call: OperatorCall, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec | None], axis_size: int
) -> Reference | None:
    """Reference on the first small instance that the operator accepts; None if there is none."""
    for instance in small_instances(call, inputs, outputs, axis_size):
        reference = reference_of(instance, outputs)
        if reference is not None:
            return reference
    return None


def reference_of(instance: SmallInstance, outputs: Sequence[TensorSpec | None]) -> Reference | None:
    """Inputs and results of one instance; None if the operator refuses it or returns something else.

    Inputs are normal; where the result is undefined for some, they are positive.
    """
    chosen = None
    for positive in (False, True):
        tensors = tuple(reference_inputs(instance, positive))
        try:
            results = _run_whole(instance, tensors)
        except _REFUSALS:
            break
        if not _as_expected(instance, results, outputs):
            break
        chosen = Reference(instance, tensors, results)
        if not any(result is not None and result.isnan().any() for result in results):
            break
    return chosen


def _run_whole(instance: SmallInstance, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    call = instance.call
    if str(call.target) in RANDOM_OPERATORS:  # torch's generators draw other numbers
        specs = _fake_results(instance)
        replicated = tuple(None if spec is None else ("R",) for spec in specs)
        return run_local(call, specs, tensors, instance.inputs, replicated, (("R",),) * len(tensors), (1,), (0,))
    args, kwargs = call.arguments(tensors)
    return tuple(
        result.clone() if isinstance(result, Tensor) else None for result in _sequence(call.target(*args, **kwargs))
    )


def _fake_results(instance: SmallInstance) -> tuple[TensorSpec | None, ...]:
    metas = [torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta") for spec in instance.inputs]
    args, kwargs = instance.call.arguments(metas, torch.device("meta"))
    results = _sequence(instance.call.target(*args, **kwargs))
    return tuple(_spec_of(result) if isinstance(result, Tensor) else None for result in results)


def _sequence(returned: Any) -> tuple[Any, ...]:
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def _as_expected(
    instance: SmallInstance, results: Sequence[Tensor | None], outputs: Sequence[TensorSpec | None]
) -> bool:
    """Whether the instance returns the same kinds of tensors as the real operator, at the derived shapes."""
    return len(results) == len(outputs) and all(
        spec is None or (result is not None and (shape is None or tuple(result.shape) == shape))
        for result, spec, shape in zip(results, outputs, instance.outputs, strict=True)
    )


def _spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))


def rule_failure(reference: Reference, rule: AxisRule) -> Exception | None:
    """Reason why a rule does not reproduce the reference; None if it does."""
    outputs = [None if entry is None else (entry,) for entry in rule.outputs]
    return strategy_failure(
        reference, outputs, [(entry,) for entry in rule.inputs], CHECKED_MESH, bool(rule.collectives)
    )


def strategy_failure(
    reference: Reference,
    outputs: Sequence[Placement | None],
    inputs: Sequence[Placement],
    mesh: Sequence[int],
    collectives: bool,
) -> Exception | None:
    """Reason why local operators under some placements do not reproduce the reference; None if they do.

    Local operators may communicate only with ``collectives``; without it a collective is an error.
    """
    try:
        parts = [split(tensor, placed, mesh) for tensor, placed in zip(reference.tensors, inputs, strict=True)]

        def run(coordinate: tuple[int, ...], reducer: ThreadReducer) -> tuple[Any, ...]:
            rank = 0
            for position, count in zip(coordinate, mesh, strict=True):
                rank = rank * count + position
            return run_local(
                reference.instance.call, reference.output_specs, [part[rank] for part in parts],
                reference.instance.inputs, outputs, inputs, mesh, coordinate, reducer,
            )  # fmt: skip

        results = run_ranks(run, mesh, collectives)
        for at, (whole, placed) in enumerate(zip(reference.results, outputs, strict=True)):
            if whole is not None and placed is not None:
                compare(join([result[at] for result in results], placed, mesh), whole)
    except _REFUSALS as error:
        return error
    return None
