"""Labels inside of what a loss function closes over, and the ways in which examples reach its parameters."""

from __future__ import annotations

import functools
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.steps.reference_interpreter import run_reference
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from planner import api
from planner.common.model_error import ModelError
from planner.models.closed_over import lift_tensors
from planner.models.references import ModelReference, TrainingStep, load_step
from planner.strategies.traced_step import TraceError, input_tensors, trace_step
from planner.torch_adapter.tracing.step_module import step_loss

BATCH = 4
Pair = namedtuple("Pair", ["rows", "target"])


class Trainer:
    """An object with a loss, the way training scripts have one."""

    def __init__(self, network: nn.Module, labels: Tensor) -> None:
        self.network, self.labels, self.former = network, labels, [labels + 1, nn.Parameter(torch.ones(3))]
        self.calls = [0]

    @property
    def target(self) -> Tensor:
        return self.labels

    def loss(self, output: Tensor) -> Tensor:
        self.calls[0] += 1
        return cross_entropy(output, self.target)

    def penalized(self, output: Tensor) -> Tensor:
        return self.loss(output) + 0.1 * sum(p.square().sum() for p in self.network.parameters())


class CalledTrainer(Trainer):
    __call__ = Trainer.loss


@dataclass(frozen=True, slots=True)
class Example:
    target: Tensor


def in_batch(output: Tensor, batch: Any) -> Tensor:
    return cross_entropy(output, batch.target)


Made = Callable[[nn.Module, Tensor], tuple[tuple[Tensor, ...], dict[str, Any], Callable[..., Tensor]]]


def closing_over(held: Callable[[Tensor], Any], loss: Callable[[Tensor, Any], Tensor]) -> Made:
    def made(network: nn.Module, labels: Tensor) -> Any:
        batch = held(labels)
        return (), {}, lambda output: loss(output, batch)

    return made


def with_helper(network: nn.Module, labels: Tensor) -> Any:
    def helper(output: Tensor) -> Tensor:
        return cross_entropy(output, labels)

    return (), {}, lambda output: helper(output)


def with_criterion(network: nn.Module, labels: Tensor) -> Any:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(8))
    return (), {}, lambda output: criterion(output, labels)


HELD: dict[str, tuple[Made, tuple[str, ...]]] = {
    "list": (closing_over(lambda y: [y], lambda output, batch: cross_entropy(output, batch[0])), ("batch_0",)),
    "nested": (closing_over(lambda y: {"a": (1, [y])}, lambda o, b: cross_entropy(o, b["a"][1][0])), ("batch_a_1_0",)),
    "dictionary": (closing_over(lambda y: {"y": y}, lambda o, b: cross_entropy(o, b["y"])), ("batch_y",)),
    "user dictionary": (
        closing_over(lambda y: UserDict(y=y), lambda o, b: cross_entropy(o, b["y"])),
        ("batch_data_y",),
    ),
    "namespace": (closing_over(lambda y: SimpleNamespace(target=y), in_batch), ("batch_target",)),
    "named tuple": (closing_over(lambda y: Pair(None, y), in_batch), ("batch_1",)),
    "slots": (closing_over(Example, in_batch), ("batch_target",)),
    "bound method": (lambda network, y: ((), {}, Trainer(network, y).loss), ("self_labels",)),
    "partial of a method": (
        lambda network, y: ((), {}, functools.partial(Trainer.loss, Trainer(network, y))),
        ("self_labels",),
    ),
    "closed-over method": (
        closing_over(lambda y: Trainer(nn.Linear(1, 1), y).loss, lambda o, b: b(o)),
        ("batch_self_labels",),
    ),
    "callable object": (lambda network, y: ((), {}, CalledTrainer(network, y)), ("labels",)),
    "partial": (lambda network, y: ((), {}, functools.partial(cross_entropy, target=y)), ("target",)),
    "partial by position": (
        lambda network, y: ((), {}, functools.partial(lambda target, output: cross_entropy(output, target), y)),
        ("target",),
    ),
    "default": (lambda network, y: ((), {}, lambda output, target=y: cross_entropy(output, target)), ("target",)),
    "helper": (with_helper, ("labels",)),
    "module": (with_criterion, ("criterion_weight", "labels")),
    "loss module": (
        lambda network, y: ((), {"target": y}, nn.CrossEntropyLoss(weight=torch.ones(8))),
        ("target", "weight"),
    ),
}

GIVEN: dict[str, tuple[Made, tuple[str, ...]]] = {
    "starred by keyword": (lambda _, y: ((), {"labels": y}, lambda o, *labels: cross_entropy(o, *labels)), ("labels",)),
    "another keyword": (lambda _, y: ((), {"y": y}, lambda o, *labels: cross_entropy(o, *labels)), ("y",)),
    "starred tuple": (
        lambda _, y: ((), {"labels": (y,)}, lambda o, *labels: cross_entropy(o, *labels)),
        ("labels[0]",),
    ),
    "starred by position": (lambda _, y: ((y,), {}, lambda o, *labels: cross_entropy(o, *labels)), ("args[1]",)),
    "plain by position": (lambda _, y: ((y,), {}, cross_entropy), ("args[1]",)),
    "positional only": (lambda _, y: ((), {"y": y}, lambda o, y, /: cross_entropy(o, y)), ("y",)),
    "any keyword": (lambda _, y: ((), {"y": y}, lambda o, **rest: cross_entropy(o, rest["y"])), ("y",)),
    "after a default": (
        lambda _, y: ((y,), {}, lambda o, scale=1.0, *labels: scale * cross_entropy(o, *labels)),
        ("args[1]",),
    ),
}
CASES = HELD | GIVEN


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8))


def example(case: str, batch: int = BATCH) -> Any:
    """The model of a case, to be named as one."""
    module = network()
    args, kwargs, loss_fn = CASES[case][0](module, torch.arange(batch) % 8)
    return module, (torch.linspace(-1, 1, batch * 6).view(batch, 6), *args), kwargs, loss_fn


def loaded(monkeypatch: pytest.MonkeyPatch, case: str, device: str) -> TrainingStep:
    monkeypatch.setitem(globals(), "model", lambda batch=BATCH: example(case, batch))
    return load_step(reference(), device)


def reference() -> ModelReference:
    return ModelReference(f"{__name__}:model", batch=BATCH, sequence=1)


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(module.parameters())))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_plain_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_meta, step = loaded(monkeypatch, case, "meta"), loaded(monkeypatch, case, "cpu")
    traced = trace_step(on_meta.module, on_meta.example_args, on_meta.example_kwargs, on_meta.loss_fn)
    graph = traced.graph
    names = [graph.values[value].name for value in graph.inputs if graph.values[value].role.value == "input"]
    assert sorted(names) == sorted(("input", *CASES[case][1]))

    module, rows, target = network(), step.example_args[0], torch.arange(BATCH) % 8
    wanted = cross_entropy(module(rows), target)
    kwargs = dict(step.example_kwargs)
    assert torch.equal(step_loss(step.module, step.example_args, kwargs, step.loss_fn), wanted)
    loss, *found = run_reference(traced, input_tensors(traced, step.module, step.example_args, kwargs))
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(found, gradients(module, wanted))


@pytest.mark.parametrize("case", HELD)
def test_other_labels_take_the_place_of_those_held(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = loaded(monkeypatch, case, "cpu")
    rows, target = step.example_args[0], 7 - torch.arange(BATCH)
    others = {name: tensor if tensor.is_floating_point() else target for name, tensor in step.example_kwargs.items()}
    found = step_loss(step.module, step.example_args, others, step.loss_fn)
    assert torch.equal(found, cross_entropy(network()(rows), target))
    again = step_loss(step.module, step.example_args, dict(step.example_kwargs), step.loss_fn)
    assert torch.equal(again, cross_entropy(network()(rows), torch.arange(BATCH)))


@pytest.mark.parametrize("case", ["list", "bound method"])
def test_a_plan_shards_labels_that_are_held(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "model", lambda batch=BATCH: example(case, batch))
    plan = api.plan(reference(), cluster="a100-8-nvlink", mesh=(2,), time_limit=10.0)
    (name,) = CASES[case][1]
    assert name in str(plan.decision.values)


def test_the_module_in_the_loss_is_the_one_of_the_step() -> None:
    module, target = network(), torch.arange(BATCH)
    trainer = Trainer(module, target)
    args = (torch.randn(BATCH, 6),)
    loss_fn, kwargs = lift_tensors(module, {}, trainer.penalized)
    assert set(kwargs) == {"self_labels"}
    assert loss_fn is not None
    traced = trace_step(module, args, kwargs, loss_fn)
    loss, *found = run_reference(traced, input_tensors(traced, module, args, kwargs))
    wanted = trainer.penalized(module(*args))
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(found, gradients(module, wanted))


def test_what_is_held_stays_as_it_is() -> None:
    module, target = network(), torch.arange(BATCH)
    trainer = Trainer(module, target)
    loss_fn, _ = lift_tensors(module, {}, trainer.loss)
    assert loss_fn is not None
    loss_fn(module(torch.randn(BATCH, 6)), self_labels=7 - target)
    assert trainer.labels is target
    assert trainer.calls == [1]  # shared, not copied: it holds no tensor


def test_objects_that_hold_one_another_are_copied_once() -> None:
    first, second = SimpleNamespace(target=torch.arange(BATCH)), SimpleNamespace()
    first.other, second.other = second, first

    def loss_fn(output: Tensor) -> Tensor:
        return cross_entropy(output, second.other.other.other.target)

    lifted, kwargs = lift_tensors(network(), {}, loss_fn)
    output, others = torch.randn(BATCH, 8), 7 - torch.arange(BATCH)
    (name,) = kwargs
    assert lifted is not None
    assert torch.equal(lifted(output, **{name: others}), cross_entropy(output, others))


def test_a_trained_tensor_is_refused_by_name() -> None:
    criterion, module = nn.Linear(8, 1), network()
    weight = module[0].weight  # type: ignore[index]
    for loss_fn, name in ((lambda output: criterion(output).sum(), "criterion_weight"), (lambda o: weight, "weight")):
        with pytest.raises(ModelError, match=f"closes over the tensor '{name}', which requires a gradient"):
            lift_tensors(module, {}, loss_fn)


def test_a_tensor_that_is_not_found_is_refused_with_the_name_of_what_holds_it() -> None:
    with torch.device("meta"):
        module, held = network(), {torch.arange(BATCH)}
    loss_fn, kwargs = lift_tensors(module, {}, lambda output: cross_entropy(output, next(iter(held))))
    assert kwargs == {}
    with pytest.raises(TraceError, match=r"test_tensor_holders.py:\d+\): .*; loss_fn closes over held \(set\), where"):
        trace_step(module, (torch.randn(BATCH, 6),), {}, loss_fn)


def test_an_object_that_does_something_at_its_end_is_not_copied() -> None:
    ends = []

    class Connection:
        def __init__(self, target: Tensor) -> None:
            self.target = target

        def __del__(self) -> None:
            ends.append(self.target)

    held = Connection(torch.arange(BATCH))
    loss_fn, kwargs = lift_tensors(network(), {}, lambda output: in_batch(output, held))
    assert kwargs == {}
    assert loss_fn is not None
    loss_fn(torch.randn(BATCH, 8))
    assert ends == []
