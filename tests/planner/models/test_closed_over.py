"""The four usual forms of a loss with labels, and what they have in common."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner.models
from planner import api
from planner.common.model_error import ModelError
from planner.models.closed_over import lift_tensors
from planner.models.references import ModelReference, load_step
from planner.strategies.traced_step import trace_step
from planner.torch_adapter.tracing.step_module import step_loss

GUIDE = Path(planner.models.__file__).with_name("README.md")
FORMS = ("inside", "beside", "after", "closed_over")


@pytest.fixture(autouse=True)
def guide(monkeypatch):
    """The module that the guide shows, to be named as a model."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    module = types.ModuleType("guide")
    exec(compile(code, str(GUIDE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "guide", module)


def reference(name: str) -> ModelReference:
    return ModelReference(f"guide:{name}", batch=4, sequence=1)


@pytest.mark.parametrize(
    ("name", "labels"),
    [("inside", "labels"), ("beside", "target"), ("after", "args[1]"), ("closed_over", "labels")],
)
def test_labels_are_inputs_of_the_step_in_every_form(name, labels):
    step = load_step(reference(name))
    graph = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn).graph
    inputs = [graph.values[v].name for v in graph.inputs if graph.values[v].role.value == "input"]
    assert len(inputs) == 2
    assert labels in inputs


def test_all_forms_are_the_same_step():
    losses, sizes = set(), set()
    for name in FORMS:
        step = load_step(reference(name), "cpu")
        torch.manual_seed(0)
        for parameter in step.module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        rows, labels = torch.linspace(-1, 1, 4 * 32).view(4, 32), torch.arange(4)
        args = (rows, labels) if name in ("inside", "after") else (rows,)
        kwargs = dict.fromkeys(step.example_kwargs, labels)
        losses.add(step_loss(step.module, args, kwargs, step.loss_fn).item())
        traced = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)
        sizes.add(len(traced.graph.operators))
    assert len(losses) == 1
    assert len(sizes) == 1


def test_a_plan_of_closed_over_labels_shards_them():
    plan = api.plan(reference("closed_over"), cluster="a100-8-nvlink", mesh=(2,), time_limit=10.0)
    assert "labels" in str(plan.decision.values)


def test_other_labels_give_another_loss():
    step = load_step(reference("closed_over"), "cpu")
    first = step_loss(step.module, step.example_args, dict(step.example_kwargs), step.loss_fn)
    others = {"labels": 7 - step.example_kwargs["labels"]}
    second = step_loss(step.module, step.example_args, others, step.loss_fn)
    assert first.item() != second.item()


def test_defaults_and_plain_values_stay_as_they_are():
    scale, labels = 2.0, torch.zeros(4, dtype=torch.int64)

    def loss_fn(output, weight=3.0, *, power=1):
        return (F.cross_entropy(output, labels) * scale * weight) ** power

    lifted, kwargs = lift_tensors(nn.Linear(4, 4), {}, loss_fn)
    assert set(kwargs) == {"labels"}
    output = torch.randn(4, 4)
    assert torch.equal(lifted(output, labels=labels), loss_fn(output))
    plain, same = lift_tensors(nn.Linear(4, 4), {"a": 1}, F.mse_loss)
    assert plain is F.mse_loss
    assert same == {"a": 1}


LABELS = torch.arange(4)
CRITERION = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
SCALE = 2.0


def _of_this_module(output):
    return CRITERION(output, LABELS)


def test_variables_of_the_module_that_the_code_reads_are_lifted():
    def loss_fn(output):
        def inside():
            return _of_this_module(output) * SCALE

        return inside() + F.cross_entropy(output, LABELS)

    lifted, kwargs = lift_tensors(nn.Linear(4, 4), {}, loss_fn)
    assert set(kwargs) == {"CRITERION_weight", "LABELS"}
    assert kwargs["LABELS"] is LABELS
    output = torch.randn(4, 4)
    assert torch.equal(lifted(output, **kwargs), loss_fn(output))
    others = {"LABELS": 3 - LABELS, "CRITERION_weight": torch.ones(4)}
    expected = F.cross_entropy(output, 3 - LABELS) * (SCALE + 1)
    assert torch.allclose(lifted(output, **others), expected)
    assert torch.equal(LABELS, torch.arange(4)), "the module itself is not changed"


def test_attributes_of_the_same_name_as_a_variable_lift_nothing():
    class Batch:
        LABELS = 3

    lifted, kwargs = lift_tensors(nn.Linear(4, 4), {}, lambda output: output.sum() * Batch().LABELS)
    assert kwargs == {}
    assert "LABELS" in lifted.__code__.co_names


def test_a_name_that_is_taken_is_refused_with_the_remedy():
    input = torch.randn(4, 4)
    with pytest.raises(ModelError, match=r"closes over the tensor 'input': make it a parameter, loss_fn\(output, i"):
        lift_tensors(nn.Linear(4, 4), {}, lambda output: F.mse_loss(output, input))
