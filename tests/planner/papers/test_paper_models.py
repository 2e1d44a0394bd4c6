"""The transformers of the KIWI paper: what they compute, and how many operators they are."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch.nn import functional

from planner.models.references import ModelReference, load_step
from planner.papers.kiwi import models as paper_models
from planner.papers.kiwi.models import FUSED, PRIMITIVE, Attention, decoder, encoder, encoder_of_primitives
from planner.strategies.baselines import full_checkpoint, megatron_selective, surviving_values
from planner.strategies.traced_step import TracedStep, trace_step

SMALL = {"batch": 2, "sequence": 8, "layers": 2, "hidden": 16, "heads": 4}


@cache
def traced(name: str, layers: int) -> TracedStep:
    step = load_step(ModelReference(f"planner.papers.kiwi.models:{name}", batch=16, sequence=1024, layers=layers))
    return trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)


def test_primitives_are_the_same_model():
    fused, (states,), labels, loss = encoder(**SMALL)
    primitive, *_ = encoder_of_primitives(**SMALL)
    primitive.load_state_dict(fused.state_dict())
    gradients = []
    for module in (fused, primitive):
        loss(module(states), **labels).backward()
        gradients.append({name: parameter.grad for name, parameter in module.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernels", [FUSED, PRIMITIVE])
def test_attention_is_torchs_own(causal, kernels):
    attention, states = Attention(16, 4, 0.0, kernels, causal), torch.randn(2, 8, 16)
    query, key, value = (
        project(states).view(2, 8, 4, 4).transpose(1, 2)
        for project in (attention.query, attention.key, attention.value)
    )
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    torch.testing.assert_close(attention(states), attention.output(mixed.transpose(1, 2).reshape(2, 8, 16)))


@pytest.mark.parametrize(("make", "causal"), [(encoder, False), (encoder_of_primitives, False), (decoder, True)])
def test_only_the_decoder_is_causal(make, causal):
    module, (states,), _, _ = make(**SMALL)
    changed = states.clone()
    changed[:, -1] += 1
    same = torch.equal(module(states)[:, :-1], module(changed)[:, :-1])
    assert same == causal


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_sizes_are_the_papers(name):
    graph = traced(name, 4).graph
    matrices = [parameter.spec for parameter in graph.parameters if len(parameter.spec.shape) == 2]
    assert sum(spec.nbytes for spec in matrices) == 4 * 1258291200, "4 layers of 12 x 5120 x 5120 in 32 bits"
    scores = [value for value in graph.values if value.spec.shape == (16, 40, 1024, 1024)]
    assert scores, "attention is written out"


@pytest.mark.slow_cases("encoder_of_primitives-257-141", "encoder-157-57")
@pytest.mark.parametrize(
    ("name", "per_layer", "computing_per_layer"),
    [("encoder", 157, 57), ("decoder", 161, 61), ("encoder_of_primitives", 257, 141)],
)
def test_operators_per_layer(name, per_layer, computing_per_layer):
    """The paper's encoder has 278 operators of XLA per layer (its Table 2)."""
    counts = []
    for layers in (2, 3):
        operators = traced(name, layers).graph.operators
        counts.append(Counter("view" if operator.is_view else "computing" for operator in operators))
    more = counts[1] - counts[0]
    assert (more.total(), more["computing"]) == (per_layer, computing_per_layer)


@pytest.mark.parametrize(
    ("name", "core"),
    [
        ("encoder", ["bmm", "div", "_softmax"]),
        ("decoder", ["bmm", "div", "masked_fill", "_softmax"]),
        ("encoder_of_primitives", ["bmm", "div", "amax", "sub", "exp", "sum", "div"]),
    ],
)
def test_rules_find_attention_and_layers(name, core):
    graph = traced(name, 2).graph
    again = [graph.operators[index].target.split(".")[1] for index in sorted(megatron_selective(graph))]
    assert [operator for operator in again if operator not in ("clone", "expand")] == core * 2
    kept = surviving_values(graph, full_checkpoint(graph))
    outputs = [graph.values[value] for value in kept if graph.values[value].spec.shape == (16, 1024, 5120)]
    assert len(outputs) == 2, "one per layer"


def test_dropout_is_asked_for():
    step = load_step(ModelReference("planner.papers.kiwi.models:encoder", batch=2, sequence=8, layers=1, dropout=0.1))
    graph = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn).graph
    assert sum(operator.is_random for operator in graph.operators) == 3
    assert paper_models.HIDDEN % paper_models.HEADS == 0
