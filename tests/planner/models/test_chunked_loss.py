"""Losses in chunks: the same loss and gradients, in many small operators instead of few large ones."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import pytest
import torch
from support.steps.planned_steps import CONFIGURATIONS
from support.tiers import slow

from formulations.problem.solution import SolveOptions
from formulations.solvers.peaks.minimum_peak import minimum_peak
from formulations.step.sharding import MEMORY
from planner.common.model_error import ModelError
from planner.models.chunked_loss import IGNORED, chunked_cross_entropy
from planner.models.references import ModelReference, load_step
from planner.session import PlanningSession, PlanRequest
from planner.strategies.traced_step import trace_step

GPT2 = ModelReference("hf:gpt2", 2, 24, "float32", 0, layers=1, dropout=0.0)


def loss_and_gradients(reference: ModelReference, labels: torch.Tensor):
    step = load_step(reference, "cpu")
    loss = step.module(**{**step.example_kwargs, "labels": labels}).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in step.module.named_parameters()}


LABELS = torch.randint(50_000, (2, 24), generator=torch.Generator().manual_seed(1))
LABELS[0, 3:17] = IGNORED


@pytest.fixture(scope="module")
def whole_step():
    return loss_and_gradients(GPT2, LABELS)


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("chunks", [2, 5, slow(24)])
def test_a_chunked_step_is_the_same_step(chunks, whole_step):
    whole, expected = whole_step
    loss, gradients = loss_and_gradients(replace(GPT2, loss_chunks=chunks), LABELS)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(gradients, expected)


def test_nobody_sees_the_logits_of_all_tokens():
    step = load_step(replace(GPT2, loss_chunks=4))
    graph = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn).graph
    sizes = {prod(value.spec.shape) for value in graph.values if 50257 in value.spec.shape}
    assert sizes == {50257 * 12, 50257 * 768}  # logits of six tokens of two sequences; the head


def test_ignored_labels_count_nowhere_and_nothing_follows_the_last():
    hidden = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    head = torch.nn.Linear(3, 7, dtype=torch.float64)
    labels = torch.tensor([[5, 2, IGNORED, 4, 1, 0]])
    pairs = [(0, 2), (2, 4), (3, 1), (4, 0)]
    logs = torch.log_softmax(head(hidden[0]), dim=-1)
    expected = -sum(logs[at, token] for at, token in pairs) / len(pairs)
    torch.testing.assert_close(chunked_cross_entropy(hidden, head, labels, 4).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_chains_need_the_logits_of_one_chunk_at_a_time(tmp_path):
    """A narrow model with many words: what the loss holds is nearly all there is to hold."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGURATIONS["llama"], "vocab_size": 5000}))
    narrow = ModelReference(f"hf:{path}", 4, 24, "float32", 0, dropout=0.0)
    floors = {}
    for chunks in (1, 6):
        here = PlanningSession(replace(narrow, loss_chunks=chunks), "a100-8-nvlink", (1,), "sgd")
        problem = here.problem(PlanRequest(formulation="kiwi_chain"))
        floors[chunks] = minimum_peak(problem.problem, MEMORY, SolveOptions(time_limit=10, workers=1)).peak
    logits = 4 * 24 * 5000 * 4
    assert floors[6] <= floors[1] - logits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "hf:bert"}, "only causal language models take --loss-chunks"),
        ({"source": "tests.support:model"}, "only models hf:... take them"),
        ({"loss_chunks": 25}, "a sequence of 24 tokens has no more parts"),
        ({"loss_chunks": 0}, "it must be at least 1"),
    ],
)
def test_what_cannot_be_chunked_is_refused(change, message):
    with pytest.raises(ModelError, match=message):
        load_step(replace(GPT2, **{"loss_chunks": 3, **change}))
