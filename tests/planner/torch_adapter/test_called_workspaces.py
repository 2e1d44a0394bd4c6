"""What convolutions hold while they run, beside torch's own record of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from support.tiers import first
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from planner.torch_adapter.joint_graph.called_workspaces import called_workspaces

CONVOLUTION, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default

SHAPES = [
    # batch, channels, size, filters, kernel, stride, padding, groups
    (8, 3, 48, 64, 8, 8, 0, 1),
    (4, 8, 16, 8, 3, 1, 1, 1),
    (1, 16, 32, 24, 3, 1, 1, 1),
    (2, 3, 64, 256, 16, 16, 0, 1),
    (4, 33, 15, 17, 5, 2, 2, 1),
    (4, 64, 16, 128, 1, 1, 0, 1),
    (4, 64, 16, 64, 3, 2, 1, 64),
    (4, 64, 16, 64, 3, 1, 1, 4),
]


def convolutions(
    shape: tuple[int, ...], bias: bool, layout: torch.memory_format = torch.contiguous_format
) -> tuple[list[Callable[..., Any]], list[Tensor | None]]:
    """A convolution, its backward and that without the gradient of its input, and their arguments."""
    batch, channels, size, filters, kernel, stride, padding, groups = shape
    images = torch.randn(batch, channels, size, size).to(memory_format=layout)
    weight = torch.randn(filters, channels // groups, kernel, kernel).to(memory_format=layout)
    added = torch.randn(filters) if bias else None
    options = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    gradient = torch.randn_like(CONVOLUTION(images, weight, added, *options))

    def forward(images: Tensor, weight: Tensor, added: Tensor | None, _: Tensor) -> Tensor:
        return CONVOLUTION(images, weight, added, *options)

    def backward(images: Tensor, weight: Tensor, _: Tensor | None, gradient: Tensor) -> Any:
        return BACKWARD(gradient, images, weight, [filters], *options, [True, True, bias])

    def of_weight(images: Tensor, weight: Tensor, _: Tensor | None, gradient: Tensor) -> Any:
        return BACKWARD(gradient, images, weight, [filters], *options, [False, True, bias])

    return [forward, backward, of_weight], [images, weight, added, gradient]


def traced(function: Callable[..., Any], arguments: list[Tensor | None]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*arguments)


def allocated(function: Callable[..., Any], arguments: list[Tensor | None]) -> tuple[int, int]:
    """Bytes that a function allocates at once, and those that it leaves."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function(*arguments)
    events: Any = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    del result
    return max(accumulate(sizes)), sum(sizes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", first(4, SHAPES))
def test_workspaces_are_those_that_torch_records(shape: tuple[int, ...], bias: bool) -> None:
    functions, arguments = convolutions(shape, bias)
    found = []
    for function in functions:
        most, left = allocated(function, arguments)
        found += called_workspaces(traced(function, arguments)).values()
        assert found[-1] == most - left
    assert len(found) == 3
    assert max(found) > 0 or shape[4] == 1  # that is a product, for which one thread copies nothing


@pytest.mark.parametrize("threads", [1, 2])
def test_layouts_and_threads_are_those_of_the_process(threads: int) -> None:
    functions, arguments = convolutions(SHAPES[3], True, torch.channels_last)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for function in functions:
            most, left = allocated(function, arguments)
            (workspace,) = called_workspaces(traced(function, arguments)).values()
            assert workspace == most - left
    finally:
        torch.set_num_threads(before)


def test_fake_tensors_autocast_and_a_profiler_do_not_disturb() -> None:
    functions, arguments = convolutions(SHAPES[0], True)
    graph = traced(functions[0], arguments)
    plain = called_workspaces(graph)
    mode = next(node.meta["val"].fake_mode for node in graph.graph.nodes if node.op == "placeholder")
    with mode, torch.autocast("cpu"), profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        assert called_workspaces(graph) == plain


def test_convolutions_alike_are_found_by_their_names() -> None:
    functions, arguments = convolutions(SHAPES[0], True)

    def twice(*given: Tensor) -> tuple[Tensor, Tensor]:
        return functions[0](*given), functions[0](*given)

    found = called_workspaces(traced(twice, arguments))
    assert set(found) == {"convolution", "convolution_1"}
    assert len(set(found.values())) == 1
    assert called_workspaces(traced(torch.mm, [torch.randn(2, 2), torch.randn(2, 2)])) == {}
