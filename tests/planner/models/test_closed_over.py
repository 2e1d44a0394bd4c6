"""The three usual forms of a loss with labels, and what they have in common."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner import api
from planner.common.model_error import ModelError
from planner.models.closed_over import lift_tensors
from planner.models.references import ModelReference, load_step
from planner.strategies.traced_step import trace_step
from planner.torch_adapter.tracing.step_module import step_loss


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, features):
        return self.layers(features)


class WithLoss(Classifier):
    def forward(self, features, labels):
        return F.cross_entropy(self.layers(features), labels)


def closed_over(batch: int = 4):
    """Labels that the loss function closes over."""
    features, labels = torch.randn(batch, 8), torch.arange(batch) % 4
    return Classifier(), (features,), {}, lambda output: F.cross_entropy(output, labels)


def by_name(batch: int = 4):
    """Labels that the loss function names."""
    features, labels = torch.randn(batch, 8), torch.arange(batch) % 4
    return Classifier(), (features,), {"labels": labels}, lambda output, labels: F.cross_entropy(output, labels)


def in_forward(batch: int = 4):
    """Labels that the module takes, whose output is the loss."""
    features, labels = torch.randn(batch, 8), torch.arange(batch) % 4
    return WithLoss(), (features,), {"labels": labels}, None


def reference(name: str) -> ModelReference:
    return ModelReference(f"{__name__}:{name}", batch=4, sequence=1)


FORMS = ("closed_over", "by_name", "in_forward")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())


def _this_module():
    import types

    module = types.ModuleType(__name__)
    module.__dict__.update({name: globals()[name] for name in FORMS})
    return module


@pytest.mark.parametrize("name", FORMS)
def test_labels_are_inputs_of_the_step_in_every_form(name):
    step = load_step(reference(name))
    graph = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn).graph
    inputs = {graph.values[v].name for v in graph.inputs if graph.values[v].role.value == "input"}
    assert inputs == {"features", "labels"}


def test_all_forms_are_the_same_step():
    losses, digests = set(), set()
    for name in FORMS:
        step = load_step(reference(name), "cpu")
        loss = step_loss(step.module, step.example_args, dict(step.example_kwargs), step.loss_fn)
        losses.add(loss.item())
        traced = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)
        digests.add(len(traced.graph.operators))
    assert len(losses) == 1
    assert len(digests) == 1


def test_a_plan_of_closed_over_labels_shards_them():
    plan = api.plan(reference("closed_over"), cluster="a100-8-nvlink", mesh=(2,), time_limit=10.0)
    assert "labels" in str(plan.decision.values)


def test_other_labels_give_another_loss():
    step = load_step(reference("closed_over"), "cpu")
    first = step_loss(step.module, step.example_args, dict(step.example_kwargs), step.loss_fn)
    others = {"labels": 3 - step.example_kwargs["labels"]}
    second = step_loss(step.module, step.example_args, others, step.loss_fn)
    assert first.item() != second.item()


def test_defaults_and_plain_values_stay_as_they_are():
    scale, labels = 2.0, torch.zeros(4, dtype=torch.int64)

    def loss_fn(output, weight=3.0, *, power=1):
        return (F.cross_entropy(output, labels) * scale * weight) ** power

    lifted, kwargs = lift_tensors(Classifier(), {}, loss_fn)
    assert set(kwargs) == {"labels"}
    output = torch.randn(4, 4)
    assert torch.equal(lifted(output, labels=labels), loss_fn(output))
    plain, same = lift_tensors(Classifier(), {"a": 1}, F.mse_loss)
    assert plain is F.mse_loss
    assert same == {"a": 1}


def test_a_name_that_is_taken_is_refused_with_the_remedy():
    features = torch.randn(4, 4)
    with pytest.raises(ModelError, match=r"closes over the tensor 'features': make it a parameter, loss_fn\(output, f"):
        lift_tensors(Classifier(), {}, lambda output: F.mse_loss(output, features))
