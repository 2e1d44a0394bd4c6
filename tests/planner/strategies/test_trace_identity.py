"""Fingerprints, attention variants, masks of transformers, and the size that capture must master."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.steps import models
from support.steps.reference_interpreter import run_reference

from planner.graph.operator_graph import Operator, OperatorGraph, ValueRole
from planner.models.references import ModelReference, load_step
from planner.strategies.traced_step import TracedStep, input_tensors, trace_step
from planner.torch_adapter.local.calls import OperatorCall
from planner.torch_adapter.tracing.fingerprint import fingerprint

ROOT = Path(__file__).parents[3]
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


def run_python(code: str) -> dict[str, object]:
    """Run code in a process of its own; its last line is JSON."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_fingerprint_is_the_same_in_another_process() -> None:
    code = """
import json, sys
sys.path.insert(0, "tests")
from support.steps import models
from planner.strategies.traced_step import trace_step
traced = trace_step(*models.gpt(tied=True))
print(json.dumps({"fingerprint": traced.fingerprint}))
"""
    traced = trace_step(*models.gpt(tied=True))
    assert run_python(code)["fingerprint"] == traced.fingerprint
    assert len(traced.fingerprint) == 64


def test_fingerprint_does_not_depend_on_values() -> None:
    torch.manual_seed(1)
    first = trace_step(*models.gpt()).fingerprint
    torch.manual_seed(2)
    assert trace_step(*models.gpt()).fingerprint == first


@pytest.mark.fast_cases("<lambda>1", "<lambda>4")
@pytest.mark.parametrize(
    "other",
    [
        lambda: models.gpt(batch=8),
        lambda: models.gpt(layers=3),
        lambda: models.gpt(heads=2),
        lambda: models.gpt(tied=True),
        lambda: models.gpt(dropout=0.1),
        lambda: models.lora_gpt(),
        lambda: (models.GPT().bfloat16(), *models.gpt()[1:]),
    ],
)
def test_fingerprint_tells_models_apart(other: object) -> None:
    assert trace_step(*other()).fingerprint != trace_step(*models.gpt()).fingerprint  # type: ignore[operator]


def test_fingerprint_sees_constants() -> None:
    base = models.mlp()
    prints = {
        trace_step(*base[:3], lambda output, power=power: output.pow(power).mean()).fingerprint for power in (2, 3)
    }
    assert len(prints) == 2


def with_other_attention(traced: TracedStep) -> tuple[OperatorGraph, list[OperatorCall]]:
    """The graph as a device with the plain flash kernel gives it: other names, more results."""
    values = list(traced.graph.values)
    operators: list[Operator] = []
    calls: list[OperatorCall] = []
    flash = {
        f"{ATTENTION}.default": torch.ops.aten._scaled_dot_product_flash_attention.default,
        f"{ATTENTION}_backward.default": torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    }
    for operator, call in zip(traced.graph.operators, traced.calls, strict=True):
        target = flash.get(operator.target)
        if target is None:
            operators.append(operator)
            calls.append(call)
            continue
        extra = replace(values[operator.outputs[-1]], index=len(values), name=f"{operator.identity}#extra")
        values.append(extra)
        name = str(target)
        renamed = replace(operator, target=name, identity=operator.identity.replace(operator.target, name))
        operators.append(replace(renamed, outputs=(*operator.outputs, extra.index)))
        args, kwargs = call.template()
        # The kernel names dropout_p and is_causal at the places where its own schema has them.
        named = {a.name: v for a, v in zip(call.target._schema.arguments, args, strict=False)} | kwargs
        known = {a.name for a in target._schema.arguments}
        calls.append(OperatorCall.from_template(target, (), {k: v for k, v in named.items() if k in known}))
    return replace(traced.graph, values=tuple(values), operators=tuple(operators)), calls


def test_fingerprint_counts_attention_variants_as_one() -> None:
    traced = trace_step(*models.gpt())
    assert any(operator.target.startswith(ATTENTION) for operator in traced.graph.operators)
    graph, calls = with_other_attention(traced)
    assert fingerprint(graph, calls) == traced.fingerprint
    causal = [call for call in traced.calls if str(call.target).startswith(ATTENTION)]
    changed = [replace(call, leaves=tuple(leaf is not True and leaf for leaf in call.leaves)) for call in causal]
    swapped = dict(zip(map(id, causal), changed, strict=True))
    calls_without_mask = [swapped.get(id(call), call) for call in traced.calls]
    assert fingerprint(traced.graph, calls_without_mask) != traced.fingerprint


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_causal_models_of_transformers_run_the_causal_kernel_without_a_mask(kind: str, tmp_path: Path) -> None:
    step = load_step(ModelReference(models.write_configuration(tmp_path, kind), 2, 16, "float32", 0, dropout=0.0))
    traced = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)
    kernels = [o for o in traced.graph.operators if o.target == f"{ATTENTION}.default"]
    assert len(kernels) == 2
    assert all(len(kernel.inputs) == 3 for kernel in kernels)


@pytest.mark.slow
def test_packed_sequences_keep_their_mask(tmp_path: Path) -> None:
    step = load_step(ModelReference(models.write_configuration(tmp_path, "llama"), 2, 16, "float32", 0), "cpu")
    positions = torch.cat([torch.arange(6), torch.arange(10)]).repeat(2, 1)
    kwargs = {**step.example_kwargs, "position_ids": positions}
    traced = trace_step(step.module, (), kwargs)
    loss = run_reference(traced, input_tensors(traced, step.module, (), kwargs))[0]
    expected = step.module(**kwargs).loss
    torch.testing.assert_close(loss, expected)
    assert abs(loss - step.module(**{**kwargs, "position_ids": positions * 0 + torch.arange(16)}).loss) > 1e-6


@pytest.mark.slow
def test_175_billion_parameters_in_seconds_and_a_gigabyte() -> None:
    code = """
import json, time
from formulations.solvers.processes.worker_process import read_status_bytes
from planner.strategies.traced_step import trace_step
from planner.models.references import ModelReference, load_step
step = load_step(ModelReference("hf:gpt3-175b", 1, 2048, "bfloat16", 0, dropout=0.0))
started = time.process_time()
traced = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)
seconds = time.process_time() - started  # of the processor, so that a busy machine does not count
parameters = sum(value.spec.numel for value in traced.graph.parameters)
peak = read_status_bytes("self", "VmHWM")  # ru_maxrss would count what the starting process held before exec
print(json.dumps({"parameters": parameters, "peak": peak, "seconds": seconds}))
"""
    found = run_python(code)
    width, layers, vocabulary, positions = 12288, 96, 50257, 2048
    per_layer = 12 * width**2 + 13 * width
    assert found["parameters"] == layers * per_layer + (vocabulary + positions) * width + 2 * width
    assert found["peak"] <= 2**30
    assert found["seconds"] <= 30


def test_gpt2_has_its_published_size() -> None:
    step = load_step(ModelReference("hf:gpt2", 1, 32, "float32", 0, dropout=0.0))
    assert all(parameter.is_meta for parameter in step.module.parameters())
    graph = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn).graph
    assert sum(value.spec.numel for value in graph.parameters) == 124_439_808
    assert not [value for value in graph.values if value.role is ValueRole.BUFFER]
