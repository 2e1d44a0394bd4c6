"""What local operators hold while they run, measured on simulated ranks."""

from __future__ import annotations

import pytest
import torch

from planner.graph.operator_graph import Operator, OperatorGraph, Phase, TensorSpec, Value, ValueRole
from planner.graph.operator_workspaces import workspace_item_bytes
from planner.torch_adapter.local.calls import OperatorCall, Slot
from planner.torch_adapter.local.operator_traits import softmax_dim
from planner.torch_adapter.local.operators import run_local
from planner.torch_adapter.meters.storage_meter import StorageMeter
from planner.torch_adapter.rules.simulated_ranks import run_ranks, split

aten = torch.ops.aten
ROWS, CLASSES, MESH = 8, 8192, (2,)
PER_ROW = 32
"""Bytes that sums, maxima and their exchange take per row: no plan counts them."""

CASES = [
    (aten._softmax.default, "float32", "float32", 0),
    (aten._log_softmax.default, "float32", "float32", 0),
    (aten._log_softmax.default, "bfloat16", "bfloat16", 8),
    (aten._softmax.default, "float16", "float16", 8),
    (aten._log_softmax.default, "float64", "float64", 0),
    (aten._log_softmax.default, "bfloat16", "float32", 4),
    (aten._log_softmax_backward_data.default, "float32", "float32", 0),
    (aten._log_softmax_backward_data.default, "bfloat16", "bfloat16", 6),
    (aten._log_softmax_backward_data.default, "float32", "bfloat16", 4),
    (aten._softmax_backward_data.default, "float32", "float32", 0),
    (aten._softmax_backward_data.default, "bfloat16", "bfloat16", 4),
    (aten._softmax_backward_data.default, "float32", "float16", 4),
]


def spec(dtype: str) -> TensorSpec:
    return TensorSpec((ROWS, CLASSES), (CLASSES, 1), dtype)


def call_of(target, made: str) -> tuple[OperatorCall, int]:
    """Call over the last dimension, and how many tensors it takes."""
    if "backward" in str(target):
        return OperatorCall.from_template(target, (Slot(0), Slot(1), -1, getattr(torch, made)), {}), 2
    return OperatorCall.from_template(target, (Slot(0), -1, False), {}), 1


def promised(target, given: str, made: str, count: int, word: str, dim: int | None = 1) -> int:
    """What the planner counts for one placement of arguments and result."""
    values = tuple(Value(k, f"x{k}", spec(given), ValueRole.INPUT) for k in range(count))
    result = Value(count, "y", spec(made), ValueRole.ACTIVATION, producer=0)
    operator = Operator(
        0, "softmax", "softmax", str(target), "", Phase.FORWARD, tuple(range(count)), (count,), False, False, 0,
        softmax_dim=dim,
    )  # fmt: skip
    graph = OperatorGraph((*values, result), (operator,), tuple(range(count)), ())
    return workspace_item_bytes(graph, operator, (word,)) * ROWS * CLASSES // 2


def measured(target, given: str, made: str) -> int:
    """Bytes beyond arguments and results on one of two ranks that share the classes."""
    call, count = call_of(target, made)
    tensors = [torch.randn(ROWS, CLASSES).softmax(-1).to(getattr(torch, given)) for _ in range(count)]
    parts = [split(tensor, ("S1",), MESH) for tensor in tensors]
    found = []

    def run(coordinate, reducer):
        arguments = [part[coordinate[0]] for part in parts]
        meter = StorageMeter()
        with meter:
            meter.track(*arguments)
            before = meter.live_bytes
            results = run_local(
                call, [spec(made)], arguments, [spec(given)] * count, [("S1",)], [("S1",)] * count, MESH, coordinate,
                reducer,
            )  # fmt: skip
        found.append(meter.peak_bytes - before - sum(result.untyped_storage().nbytes() for result in results))
        return results

    run_ranks(run, MESH, True)
    return max(found)


@pytest.mark.parametrize(("target", "given", "made", "per_element"), CASES)
def test_rows_that_are_shared_wait_in_the_type_of_their_sums(target, given, made, per_element):
    _, count = call_of(target, made)
    counted = promised(target, given, made, count, "S1")
    assert counted == per_element * ROWS * CLASSES // 2
    assert 0 <= measured(target, given, made) - counted <= PER_ROW * ROWS


def test_whole_rows_run_in_torchs_own_kernel():
    assert promised(aten._log_softmax.default, "bfloat16", "bfloat16", 1, "S0") == 0
    assert promised(aten._log_softmax.default, "bfloat16", "bfloat16", 1, "S1", dim=0) == 0


def test_other_operators_are_not_known():
    assert promised(aten.gelu.default, "bfloat16", "bfloat16", 1, "S1", dim=None) == 0


@pytest.mark.parametrize(
    ("target", "rest", "expected"),
    [
        (aten._softmax.default, (-1, False), 2),
        (aten._log_softmax.default, (1, False), 1),
        (aten._log_softmax_backward_data.default, (torch.ones(2, 3, 4), -3, torch.float32), 0),
        (aten.sum.dim_IntList, ([1],), None),
    ],
)
def test_the_dimension_of_a_softmax_is_counted_from_the_front(target, rest, expected):
    assert softmax_dim(target, (torch.ones(2, 3, 4), *rest), {}) == expected


def test_the_dimension_of_a_softmax_without_dimensions():
    assert softmax_dim(aten._softmax.default, (torch.ones(()), -1, False), {}) == 0
