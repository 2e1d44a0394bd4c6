"""What cannot be traced is refused in one line with module, source line and remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.steps import models
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.strategies.traced_step import TraceError, trace_step


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(position for position, line in enumerate(lines) if text in line)


class CallsLambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, hidden: Tensor) -> Any:
        return self.function(self.linear(hidden))


def refusal(function: Callable[[Tensor], Any], loss_fn: Any = models.mean_square) -> str:
    with pytest.raises(TraceError) as caught:
        trace_step(CallsLambda(function), (torch.randn(2, 4),), {}, loss_fn)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_data_dependent_branch_names_module_line_and_remedy() -> None:
    with pytest.raises(TraceError) as caught:
        trace_step(*models.data_dependent_branch())
    line = line_of(models.Branch.forward, "if hidden.sum()")
    assert str(caught.value).startswith(
        f"module 1 (support/steps/models.py:{line}): control flow depends on the values"
    )
    assert "torch.where" in str(caught.value)


def test_dynamic_experts_name_the_operator() -> None:
    with pytest.raises(TraceError) as caught:
        trace_step(*models.dynamic_experts())
    line = line_of(models.DynamicExperts.forward, "torch.where")
    assert f"(support/steps/models.py:{line})" in str(caught.value)
    assert "aten.nonzero" in str(caught.value)
    assert "fixed capacity" in str(caught.value)


def test_custom_autograd_function_is_named() -> None:
    with pytest.raises(TraceError) as caught:
        trace_step(*models.custom_function())
    line = line_of(models.SquareLayer.forward, "Square.apply")
    assert str(caught.value).startswith(f"module 1 (support/steps/models.py:{line}): custom autograd.Function")
    assert "support.steps.models.Square" in str(caught.value)


def test_refusing_custom_functions_ends_with_the_capture() -> None:
    with pytest.raises(TraceError):
        trace_step(*models.custom_function())
    module, args, _, loss_fn = models.custom_function()
    loss_fn(module(*args)).backward()
    assert module[0].weight.grad is not None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda hidden: hidden * hidden.max().item(), "depends on the values"),
        (lambda hidden: hidden[hidden > 0], "aten.nonzero"),
        (lambda hidden: hidden + torch.ones(4, device="meta"), "register_buffer"),
        (lambda hidden: hidden @ torch.ones(3, 4), r"RuntimeError: a and b must have same reduction dim"),
        (lambda hidden: hidden.no_such_method(), "no_such_method"),
    ],
)
def test_errors_in_forward_name_place_and_reason(function: Callable[[Tensor], Any], words: str) -> None:
    message = refusal(function)
    assert message.startswith("module (root) (")
    assert "test_tracing_errors.py:" in message
    assert words in message


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (None, r"the module's output, which is the loss without a loss_fn, is a tensor of shape (2, 4)"),
        (lambda output: output * output, "the loss is a tensor of shape (2, 4)"),
        (lambda output: output.argmax(), "torch.int64"),
        (lambda output: output.detach().sum(), "no trainable parameter"),
        (lambda output: 1.0, "loss_fn returned, got float"),
    ],
)
def test_loss_must_be_one_trainable_number(loss_fn: Any, words: str) -> None:
    assert words in refusal(lambda hidden: hidden, loss_fn)


def test_errors_in_loss_fn_name_it_and_its_line() -> None:
    def loss_fn(output: Tensor) -> Tensor:
        return output.view(-1, 3).sum()

    line = line_of(loss_fn, "view")
    message = refusal(lambda hidden: hidden, loss_fn)
    assert message.startswith("loss_fn (")
    assert f"test_tracing_errors.py:{line}): RuntimeError: shape" in message


def test_an_argument_of_another_name_than_loss_fn_has_is_explained() -> None:
    words = (
        r"^forward of Linear takes \(input\) and is given \(input, labels=...\): unexpected keyword argument 'labels'; "
        r"loss_fn <lambda> \(planner/strategies/test_tracing_errors.py:\d+\) takes \(output, target\); what only"
    )
    with pytest.raises(TraceError, match=words):
        trace_step(nn.Linear(4, 4), (torch.randn(2, 4),), {"labels": torch.randn(2, 4)}, lambda output, target: output)


@pytest.mark.parametrize(
    ("labels", "loss_fn", "words"),
    [
        (
            2,
            nn.functional.mse_loss,
            r"^forward of Linear takes \(input\) and is given \(input, args\[1\], args\[2\]\): too",
        ),
        (1, None, r"given \(input, args\[1\]\): .*; an example that only a loss takes needs a loss_fn"),
        (
            0,
            nn.functional.mse_loss,
            r"^loss_fn mse_loss takes .* is given \(the output\): missing a .* 'target'; give it",
        ),
        (0, nn.MSELoss(), r"^loss_fn MSELoss takes \(input, target\) and is given \(the output\): missing a"),
    ],
)
def test_arguments_too_many_or_too_few_are_named(labels: int, loss_fn: Any, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        trace_step(nn.Linear(4, 4), (torch.randn(2, 4),) * (1 + labels), {}, loss_fn)


def test_a_type_error_inside_of_forward_keeps_its_line() -> None:
    line = inspect.getsourcelines(test_a_type_error_inside_of_forward_keeps_its_line)[1] + 2
    message = refusal(lambda hidden: hidden.sum(no_such_keyword=1))
    assert message.startswith(f"module (root) (planner/strategies/test_tracing_errors.py:{line}): TypeError: sum()")


def test_output_without_loss_is_refused() -> None:
    assert "got tuple: give a loss_fn" in refusal(lambda hidden: (hidden, hidden), None)


def test_parameter_changed_in_forward_is_refused() -> None:
    class Decay(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
            return super().forward(hidden)

    with pytest.raises(TraceError, match="forward changes parameter weight in place"):
        trace_step(Decay(4, 4), (torch.randn(2, 4),), {}, models.mean_square)


def test_sparse_gradients_are_refused() -> None:
    module = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(TraceError, match="sparse=False"):
        trace_step(module, (torch.tensor([1, 2]),), {}, models.mean_square)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda hidden: torch.poisson(hidden.abs()), "aten.poisson.default"),
        (lambda hidden: hidden[:, torch.randperm(4)], "aten.randperm.default"),
    ],
)
def test_random_operator_without_a_plan_names_the_place(function: Callable[[Tensor], Any], operator: str) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.noise = nn.Linear(4, 4), CallsLambda(function)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.linear(hidden) + self.noise(hidden)

    with pytest.raises(TraceError) as caught:
        trace_step(Noisy(), (torch.randn(2, 4),), {}, models.mean_square)
    message = str(caught.value)
    assert message.startswith("module noise (")
    assert f"test_tracing_errors.py:{function.__code__.co_firstlineno}): {operator} draws random numbers" in message
    assert "aten.native_dropout.default" in message


def test_module_survives_a_refused_capture() -> None:
    module, args, kwargs, loss_fn = models.data_dependent_branch()
    weight = module[0].weight
    with pytest.raises(TraceError):
        trace_step(module, args, kwargs, loss_fn)
    assert module[0].weight is weight
    assert not module[1]._forward_pre_hooks
    loss_fn(module(*args)).backward()
    assert weight.grad is not None


class Cast(nn.Module):
    """A linear layer under autocast of a device."""

    def __init__(self, device: str, enabled: bool = True) -> None:
        super().__init__()
        self.linear, self.device, self.enabled = nn.Linear(8, 4), device, enabled

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.enabled):
            return self.linear(hidden)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_of_another_device_is_refused_by_name_and_line() -> None:
    class Decorated(nn.Linear):
        @torch.autocast("cuda", dtype=torch.bfloat16)
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden)

    with pytest.raises(TraceError) as caught:
        trace_step(Cast("cuda"), (torch.randn(2, 8),), {}, models.mean_square)
    line = line_of(Cast.forward, "with torch.autocast")
    assert str(caught.value).startswith(
        f"module (root) (planner/strategies/test_tracing_errors.py:{line}): torch.autocast('cuda') leaves no casts"
    )
    with pytest.raises(TraceError, match=r"torch.autocast\('cuda'\) leaves no casts"):
        trace_step(Decorated(8, 4), (torch.randn(2, 8),), {}, models.mean_square)
    with torch.autocast("cpu"), pytest.raises(TraceError, match="is on around the planner"):
        trace_step(Cast("cpu"), (torch.randn(2, 8),), {}, models.mean_square)
    traced = trace_step(Cast("cuda", enabled=False), (torch.randn(2, 8),), {}, models.mean_square)
    assert traced.graph.notes == ()
    assert {value.spec.dtype for value in traced.graph.values} == {"float32"}


def test_autocast_of_cpus_is_in_the_graph_and_noted() -> None:
    traced = trace_step(Cast("cpu"), (torch.randn(2, 8),), {}, models.mean_square)
    (product,) = (each for each in traced.graph.operators if each.target == "aten.addmm.default")
    assert product.outputs[0] is not None
    assert traced.graph.values[product.outputs[0]].spec.dtype == "bfloat16"
    assert [note for note in traced.graph.notes if "casts to bfloat16 by the rules of CPUs" in note]
    assert Cast("cpu")(torch.randn(2, 8)).dtype is torch.bfloat16


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))
        self.reentrant = reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        if self.reentrant is None:
            return self.block(hidden)
        return checkpoint(self.block, hidden, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_left_to_the_plan(reentrant: bool) -> None:
    args = (torch.randn(2, 8),)
    plain, checkpointed = (
        [
            (each.target, each.phase)
            for each in trace_step(Checkpointed(kind), args, {}, models.mean_square).graph.operators
        ]
        for kind in (None, reentrant)
    )
    assert checkpointed == plain


def test_reentrant_checkpointing_without_a_gradient_is_refused() -> None:
    module = Checkpointed(True)
    module.first = nn.Identity()
    with pytest.raises(TraceError, match="use use_reentrant=False"):
        trace_step(module, (torch.randn(2, 8),), {}, models.mean_square)
