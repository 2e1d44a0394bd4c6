"""Graphs that are compiled, read as kernels: what is generated together, what stays in memory, in which order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from planner.graph.kernel_graph import CompileError, Kernel, KernelGraph
from planner.torch_adapter.joint_graph.kernel_reader import read_kernels

aten = torch.ops.aten


def read(function: Callable[..., object], *shapes: tuple[int, ...], inlined: bool = True) -> KernelGraph:
    traced = make_fx(function, tracing_mode="fake")(*(torch.empty(shape) for shape in shapes))
    traced.graph.eliminate_dead_code()
    return read_kernels(traced, inlined)


def kinds(graph: KernelGraph) -> list[str]:
    """Per kernel ``generated``, or the operator that is called."""
    return ["generated" if each.is_generated else each.targets[0][0].split(".")[1] for each in graph.kernels]


def generated(graph: KernelGraph) -> list[Kernel]:
    return [kernel for kernel in graph.kernels if kernel.is_generated]


def test_elementwise_operators_between_products_are_one_kernel() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        hidden = aten.mm(x, a)
        return aten.mm(aten.mul(hidden, aten.tanh(aten.add(hidden, 1.0))), b)

    graph = read(function, (4, 8), (8, 16), (16, 8))
    assert kinds(graph) == ["mm", "generated", "mm"]
    (kernel,) = generated(graph)
    assert kernel.reads == graph.kernels[0].writes
    assert len(kernel.writes) == 1
    assert graph.sizes[kernel.writes[0]] == 4 * 16 * 4
    assert graph.kernels[0].flops == 2 * 4 * 8 * 16


def test_every_operator_is_a_kernel_where_nothing_is_generated() -> None:
    graph = read(lambda x: aten.mul(aten.tanh(x), 2.0), (4, 8), inlined=False)
    assert kinds(graph) == ["tanh", "mul"]
    assert [len(kernel.writes) for kernel in graph.kernels] == [1, 1]


def test_reductions_and_what_is_made_of_them_are_one_kernel() -> None:
    def function(x: Tensor, a: Tensor) -> Tensor:
        variance, mean = aten.var_mean(x, [1], correction=0, keepdim=True)
        return aten.mm(aten.mul(aten.sub(x, mean), aten.rsqrt(variance)), a)

    graph = read(function, (4, 8), (8, 16))
    assert kinds(graph) == ["generated", "mm"]
    assert len(generated(graph)[0].writes) == 1


def test_a_sum_of_few_tensors_is_computed_again_where_it_is_read_later() -> None:
    def function(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        residual = aten.add(aten.mm(x, a), y)
        return aten.add(aten.mm(aten.tanh(residual), a), residual)

    graph = read(function, (4, 8), (4, 8), (8, 8))
    assert kinds(graph) == ["mm", "generated", "mm", "generated"]
    before, after = generated(graph)
    assert before.writes == graph.kernels[2].reads[:1], "the residual itself is not stored"
    assert set(graph.kernels[0].writes) <= set(after.reads)


def test_a_sum_of_many_tensors_is_stored() -> None:
    def function(x: Tensor, a: Tensor, *rest: Tensor) -> Tensor:
        residual = x
        for each in rest:
            residual = aten.add(residual, each)
        return aten.add(aten.mm(aten.tanh(residual), a), residual)

    graph = read(function, (4, 8), (8, 8), *[(4, 8)] * 5)
    assert len(generated(graph)[0].writes) == 2


def test_views_have_the_memory_of_what_they_are_views_of() -> None:
    def function(x: Tensor, a: Tensor) -> Tensor:
        left, right = aten.split(aten.mm(x, a), 8, 1)
        return aten.bmm(aten.view(left, [1, 4, 8]), aten.permute(aten.view(right, [1, 4, 8]), [0, 2, 1]))

    graph = read(function, (4, 8), (8, 16))
    assert kinds(graph) == ["mm", "bmm"]
    assert graph.kernels[1].reads == graph.kernels[0].writes


def test_results_of_one_operator_are_values_of_their_own() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = aten.topk(x, 2)
        return values, indices

    graph = read(function, (4, 8))
    assert [graph.sizes[name] for name in graph.kernels[0].writes] == [4 * 2 * 4, 4 * 2 * 8]


def test_results_of_one_operator_are_in_memory_where_generated_kernels_alone_read_them() -> None:
    def function(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        of_x, of_weight, _ = aten.convolution_backward(gradient, x, weight, None, *options)
        return aten.mul(of_x, 2.0), of_weight

    graph = read(function, (2, 3, 8, 8), (5, 3, 3, 3), (2, 5, 8, 8))
    assert kinds(graph) == ["convolution_backward", "generated"]
    called, after = graph.kernels
    assert [graph.sizes[name] for name in called.writes] == [2 * 3 * 8 * 8 * 4, 5 * 3 * 3 * 3 * 4]
    assert after.reads == called.writes[:1]


def test_a_constant_that_two_layers_read_does_not_make_them_one_kernel() -> None:
    def function(x: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        zero = aten.full([], 0.0)
        one, other = (aten.where(aten.gt(each, 0), each, zero) for each in (x, y))
        return aten.mm(one, a), aten.mm(other, a)

    graph = read(function, (4, 8), (4, 8), (8, 8))
    assert len(generated(graph)) == 2


@pytest.mark.parametrize(
    ("function", "allowed"),
    [
        (lambda x, g: aten.mul(g, aten.sigmoid(x)), True),
        (lambda x, g: aten.sub(g, aten.sum(g, [1], True)), True),
        (lambda x, g: aten.add(g, aten.sum(g, [0], True)), False),
        (lambda x, g: aten.add(x, aten.permute(g, [1, 0])), False),
    ],
    ids=["elementwise", "sums of rows", "sums of columns", "transposed"],
)
def test_what_may_be_written_over(function: Callable[[Tensor, Tensor], Tensor], allowed: bool) -> None:
    graph = read(lambda x, g: aten.mm(function(x, g), x), (8, 8), (8, 8))
    pairs = dict(generated(graph)[0].overwrites)
    gradient = graph.given[1]
    assert (gradient in pairs.values()) == allowed


def test_a_tensor_that_two_results_are_made_of_is_not_written_over_by_the_first() -> None:
    def function(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return aten.mm(aten.add(aten.mul(g, 2.0), aten.sum(g, [1], True)), x), aten.mm(aten.mul(g, 3.0), x)

    graph = read(function, (8, 8), (8, 8))
    assert all(
        graph.given[1] not in dict(kernel.overwrites).values() or len(kernel.writes) == 1 for kernel in graph.kernels
    )


def test_random_operators_are_marked() -> None:
    graph = read(lambda x: aten.mul(aten.bernoulli(x, 0.5), x), (4, 8), inlined=False)
    assert [kernel.is_random for kernel in graph.kernels] == [True, False]


def test_symbolic_shapes_are_refused() -> None:
    traced = make_fx(lambda x: aten.tanh(x), tracing_mode="symbolic")(torch.empty(4, 8))
    with pytest.raises(CompileError, match="dynamic=False"):
        read_kernels(traced)
