"""Costs of operators and updates, by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from planner.graph.operator_classes import OperatorClass, operator_class
from planner.graph.operator_graph import Operator, OperatorGraph, Phase, TensorSpec, Value, ValueRole
from planner.machine.cluster import ClusterSpec, DeviceSpec, LinkSpec
from planner.machine.costs import CostModel, to_quanta

LAUNCH, FLOPS, MEMORY = 1e-6, 1e12, 1e11
LINK = LinkSpec(latency_seconds=1e-5, bandwidth=1e10)


@dataclass(frozen=True)
class Inner:
    axis: int
    kind: str
    nbytes: int


@dataclass(frozen=True)
class Strategy:
    outputs: tuple
    inputs: tuple
    collectives: tuple = ()


def cluster(**device):
    figures = {
        "name": "test",
        "flops": {"float32": FLOPS, "bfloat16": 10 * FLOPS},
        "memory_bandwidth": MEMORY,
        "launch_seconds": LAUNCH,
        "memory_bytes": 2**30,
        "reserve_bytes": 0,
    } | device
    return ClusterSpec(
        name="test", source="test", device=DeviceSpec(**figures), devices_per_node=8, nodes=1, intra_node=LINK,
        host_link=LINK,
    )  # fmt: skip


def one_operator(target, inputs, outputs, flops=0, is_view=False, dtypes=None):
    """Graph of one operator on float32 tensors of these shapes."""
    shapes = [*inputs, *outputs]
    dtypes = dtypes or ["float32"] * len(shapes)
    values = tuple(
        Value(index, f"v{index}", TensorSpec(shape, (), dtype), ValueRole.ACTIVATION)
        for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        if shape is not None
    )
    returned = tuple(None if shape is None else len(inputs) + k for k, shape in enumerate(outputs))
    operator = Operator(
        0, "op", "op", target, "", Phase.FORWARD, tuple(range(len(inputs))), returned, is_view, False, flops
    )
    return OperatorGraph(values, (operator,), tuple(range(len(inputs))), ())


def seconds(graph, *strategies, mesh=(4,), **device):
    return CostModel(cluster(**device), mesh).operator_seconds(graph, graph.operators[0], strategies)


MM_FLOPS = 2 * 512 * 1024 * 256
MM = one_operator("aten.mm.default", [(512, 1024), (1024, 256)], [(512, 256)], MM_FLOPS)


def test_a_product_takes_its_arithmetic_shared_by_the_ranks_that_share_it():
    rows = Strategy((("S0",),), (("S0",), ("R",)))
    inner = Strategy((("Psum",),), (("S1",), ("S0",)))
    alone = Strategy((("R",),), (("R",), ("R",)))
    expected = [MM_FLOPS / 4 / FLOPS, MM_FLOPS / 4 / FLOPS, MM_FLOPS / FLOPS]
    np.testing.assert_allclose(seconds(MM, rows, inner, alone), np.array(expected) + LAUNCH)


def test_only_axes_with_something_sharded_or_partial_share_the_arithmetic():
    one = Strategy((("S0", "R"),), (("S0", "R"), ("R", "R")))
    both = Strategy((("S0", "Psum"),), (("S0", "S1"), ("R", "S0")))
    np.testing.assert_allclose(
        seconds(MM, one, both, mesh=(2, 4)), np.array([MM_FLOPS / 2, MM_FLOPS / 8]) / FLOPS + LAUNCH
    )


def test_the_arithmetic_runs_at_the_rate_of_the_dtype_and_of_the_class():
    half = one_operator("aten.mm.default", [(512, 1024), (1024, 256)], [(512, 256)], MM_FLOPS, dtypes=["bfloat16"] * 3)
    alone = Strategy((("R",),), (("R",), ("R",)))
    memory = 2 * (512 * 1024 + 1024 * 256 + 512 * 256) / MEMORY
    assert seconds(half, alone)[0] == pytest.approx(max(MM_FLOPS / FLOPS / 10, memory) + LAUNCH)
    assert seconds(half, alone, memory_bandwidth=1e15)[0] == pytest.approx(MM_FLOPS / FLOPS / 10 + LAUNCH)
    assert seconds(MM, alone, efficiency={"matmul": 0.5})[0] == pytest.approx(2 * MM_FLOPS / FLOPS + LAUNCH)


def test_an_elementwise_operator_takes_its_bytes():
    add = one_operator("aten.add.Tensor", [(64, 1000), (1000,)], [(64, 1000)])
    split, alone = Strategy((("S0",),), (("S0",), ("R",))), Strategy((("R",),), (("R",), ("R",)))
    np.testing.assert_allclose(
        seconds(add, split, alone), np.array([4 * (2 * 16000 + 1000), 4 * (2 * 64000 + 1000)]) / MEMORY + LAUNCH
    )


def test_an_operators_own_bandwidth_goes_before_its_classs():
    tanh = one_operator("aten.tanh.default", [(1000, 1000)], [(1000, 1000)])
    alone = Strategy((("R",),), (("R",),))
    rates = {"transcendental": MEMORY / 2}
    assert seconds(tanh, alone, bandwidth_by_class=rates)[0] == pytest.approx(2 * 8e6 / MEMORY + LAUNCH)
    rates["tanh"] = MEMORY / 8
    assert seconds(tanh, alone, bandwidth_by_class=rates)[0] == pytest.approx(8 * 8e6 / MEMORY + LAUNCH)


def test_a_lookup_reads_rows_and_its_backward_clears_the_table():
    dtypes = ["float32", "int64", "float32"]
    look = one_operator("aten.embedding.default", [(50000, 64), (32,)], [(32, 64)], dtypes=dtypes)
    back = one_operator("aten.embedding_dense_backward.default", [(32, 64), (32,)], [(50000, 64)], dtypes=dtypes)
    alone = Strategy((("R",),), (("R",), ("R",)))
    assert seconds(look, alone)[0] == pytest.approx((2 * 4 * 2048 + 8 * 32) / MEMORY + LAUNCH)
    assert seconds(back, alone)[0] == pytest.approx((2 * 4 * 3200000 + 4 * 2048 + 8 * 32) / MEMORY + LAUNCH)


def test_views_cost_nothing_and_missing_outputs_no_bytes():
    view = one_operator("aten.view.default", [(64, 64)], [(4096,)], is_view=True)
    assert seconds(view, Strategy((("R",),), (("R",),))).tolist() == [0.0]
    norm = one_operator("aten.add.Tensor", [(64, 64)], [(64, 64), None])
    assert seconds(norm, Strategy((("R",), None), (("R",),)))[0] == pytest.approx(2 * 4 * 4096 / MEMORY + LAUNCH)


def test_collectives_inside_an_operator_are_paid_on_their_axis():
    plain = Strategy((("R",),), (("R",), ("R",)))
    loud = replace(plain, collectives=(Inner(0, "all_reduce", 4000), Inner(0, "all_gather", 8000)))
    extra = 3 * (3 * 1e-5) + (2 * 0.75 * 4000 + 0.75 * 8000) / 1e10 + 2 * LAUNCH
    quiet, paid = seconds(MM, plain, loud)
    assert paid - quiet == pytest.approx(extra)


def test_answers_are_remembered_and_read_only():
    model, alone = CostModel(cluster(), (4,)), Strategy((("R",),), (("R",), ("R",)))
    first = model.operator_seconds(MM, MM.operators[0], [alone])
    assert model.operator_seconds(MM, MM.operators[0], [alone]) is first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0.0


def test_updates_move_each_tensor_once():
    model = CostModel(cluster(), (4,))
    assert model.update_seconds(1000, "float32", "float32", "adamw") == pytest.approx(7 * 4000 / MEMORY + LAUNCH)
    assert model.update_seconds(1000, "bfloat16", "float32", "sgd") == pytest.approx(4 * 2000 / MEMORY + LAUNCH)
    slow = CostModel(cluster(bandwidth_by_class={"optimizer": MEMORY / 10}), (4,))
    assert slow.update_seconds(1000, "float32", "float32", "adamw") == pytest.approx(70 * 4000 / MEMORY + LAUNCH)


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match=r"'adam'.*adamw, sgd"):
        CostModel(cluster(), (4,)).update_seconds(10, "float32", "float32", "adam")


def test_a_slower_machine_is_never_faster():
    strategies = [Strategy((("R",),), (("R",), ("R",))), Strategy((("S0",),), (("S0",), ("R",)))]
    base = seconds(MM, *strategies)
    for change in ({"flops": {"float32": FLOPS / 10}}, {"memory_bandwidth": MEMORY / 10}, {"launch_seconds": 1e-5}):
        assert np.all(seconds(MM, *strategies, **change) >= base)


def test_quanta_are_nanoseconds_rounded_up():
    assert to_quanta([0.0, 1e-6, 1.5e-9, 1e-12, 3.0]).tolist() == [0, 1000, 2, 1, 3_000_000_000]
    assert to_quanta(2e-9).dtype == np.int64
    assert [int(to_quanta(count * 1e-9)) for count in range(2000)] == list(range(2000))


@pytest.mark.parametrize("wrong", [np.inf, np.nan, -1e-9])
def test_quanta_of_what_is_no_time_are_refused(wrong):
    with pytest.raises(ValueError, match="finite and not negative"):
        to_quanta([1.0, wrong])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("aten.addmm.default", OperatorClass.MATMUL),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", OperatorClass.ATTENTION_FORWARD),
        ("aten._scaled_dot_product_efficient_attention_backward.default", OperatorClass.ATTENTION_BACKWARD),
        ("aten.convolution_backward.default", OperatorClass.CONVOLUTION),
        ("aten.native_layer_norm.default", OperatorClass.NORMALIZATION),
        ("aten.pow.Tensor_Scalar", OperatorClass.TRANSCENDENTAL),
        ("mylib.unheard_of.default", OperatorClass.POINTWISE),
    ],
)
def test_classes(target, expected):
    assert operator_class(target) is expected
