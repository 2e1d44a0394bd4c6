"""A model that peft wraps: captured as it is, and only what it trains has gradients, optimizer state and reductions."""

from __future__ import annotations

import pytest
import torch
from support.steps import models
from support.steps.reference_interpreter import run_reference
from torch import nn

from planner import api
from planner.graph.operator_graph import OutputRole
from planner.models.references import ModelReference, load_step
from planner.strategies.traced_step import input_tensors, trace_step

RANK, LAYERS = 4, 2
REFERENCE = ModelReference(f"{__name__}:adapted_gpt2", batch=4, sequence=16)


def adapted_gpt2(batch: int = 4, sequence: int = 16) -> models.Step:
    """GPT-2 with low-rank updates of its attention, as the guide of peft makes it."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 96, "n_positions": 32, "n_embd": 32, "n_layer": LAYERS, "n_head": 4}
    plain = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False))
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", r=RANK, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    module: nn.Module = peft.get_peft_model(plain, adapters).train()
    tokens = torch.randint(96, (batch, sequence))
    return module, (), {"input_ids": tokens, "labels": tokens.clone()}, None


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("peft", reason="peft is not installed")


def test_only_adapters_are_trained_and_their_gradients_are_those_of_torch() -> None:
    on_meta = load_step(REFERENCE)
    assert {tensor.device.type for tensor in on_meta.module.parameters()} == {"meta"}
    traced = trace_step(on_meta.module, on_meta.example_args, on_meta.example_kwargs, on_meta.loss_fn)
    graph = traced.graph
    trained = {value.name for value in graph.parameters if value.trainable}
    assert len(trained) == 2 * LAYERS
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert graph.notes == ()

    step = load_step(REFERENCE, "cpu")
    results = run_reference(traced, input_tensors(traced, step.module, (), step.example_kwargs))
    loss = step.module(**step.example_kwargs).loss
    loss.backward()
    parameters = dict(step.module.named_parameters())
    reduced = set()
    for output, result in zip(graph.outputs, results, strict=True):
        if output.role is OutputRole.LOSS:
            assert torch.equal(result, loss.detach())
        else:
            assert output.of is not None
            name = graph.values[output.of].name
            assert torch.equal(result, parameters[name].grad)
            assert result.abs().sum() > 0
            reduced.add(name)
    assert reduced == trained


def test_a_plan_updates_the_adapters_alone() -> None:
    plan = api.plan(REFERENCE, cluster="a100-8-nvlink", mesh=(2,), time_limit=10.0)
    updates = [entry for entry in plan.decision.schedule.instructions if entry.op == "update"]
    assert len(updates) == 2 * LAYERS
