"""What optimizers keep and need, measured on torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.steps.planned_steps import traced_step
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from formulations.step.training_step import NodeKind
from planner.graph.optimizers import OPTIMIZERS, Buffers, OptimizerError, optimizer_named
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel, to_quanta
from planner.models.references import ModelReference, load_step
from planner.strategies.space import build_strategy_space
from planner.strategies.traced_step import trace_step
from planner.torch_adapter.meters.storage_meter import StorageMeter

SHAPE = (128, 96)
STEP_COUNT = (0, 4, 8)
"""Bytes of AdamW's count of steps, a tensor that lives during an update; no plan counts it."""


def run_adamw(parameter: Tensor, gradient: Tensor, state: list[Tensor]) -> None:
    adamw(
        [parameter], [gradient], [state[0]], [state[1]], [], [torch.tensor(0.0)], foreach=False, fused=False,
        amsgrad=False, beta1=0.9, beta2=0.999, lr=1e-3, weight_decay=0.01, eps=1e-8, maximize=False,
    )  # fmt: skip


def run_sgd(parameter: Tensor, gradient: Tensor, state: list[Tensor]) -> None:
    sgd(
        [parameter], [gradient], [state[0] if state else None], foreach=False, fused=False, weight_decay=0.0,
        momentum=0.9 if state else 0.0, lr=1e-3, dampening=0.0, nesterov=False, maximize=False,
    )  # fmt: skip


def run_mixed(parameter: Tensor, gradient: Tensor, state: list[Tensor]) -> None:
    master, *moments = state
    run_adamw(master, gradient.float(), moments)
    parameter.copy_(master)


UPDATES: dict[str, Callable[[Tensor, Tensor, list[Tensor]], None]] = {
    "adamw": run_adamw,
    "sgd": run_sgd,
    "sgd_momentum": run_sgd,
    "adamw_mixed": run_mixed,
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in UPDATES
        for dtype in ("float32", "bfloat16")
        if (name, dtype) != ("adamw_mixed", "float32")
    ],
)
def test_an_update_holds_what_the_specification_says(name, dtype):
    spec, numel = optimizer_named(name, fused=False), SHAPE[0] * SHAPE[1]
    parameter, gradient = (torch.randn(SHAPE, dtype=getattr(torch, dtype)) for _ in range(2))
    kept = spec.state(dtype)
    state_dtype = {2: torch.bfloat16, 4: torch.float32}[kept.item_bytes]
    state = [torch.zeros(SHAPE, dtype=state_dtype) for _ in range(kept.tensors)]
    if spec.master:
        state[0].copy_(parameter)
    assert sum(tensor.nbytes for tensor in state) == kept.nbytes(numel)
    before_values = parameter.clone()
    with StorageMeter() as meter:
        meter.track(parameter, gradient, *state)
        before = meter.live_bytes
        UPDATES[name](parameter, gradient, state)
    assert meter.peak_bytes - before - spec.workspace(dtype, dtype).nbytes(numel) in STEP_COUNT
    assert meter.live_bytes == before
    assert not torch.equal(parameter, before_values)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", lambda parameters: torch.optim.AdamW(parameters, foreach=False)),
        ("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        ("sgd_momentum", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_what_torch_keeps(name, make, dtype):
    parameter = torch.nn.Parameter(torch.randn(SHAPE, dtype=getattr(torch, dtype)))
    optimizer = make([parameter])
    parameter.sum().backward()
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if value is not None and value.dim() > 0]
    spec = optimizer_named(name).state(dtype)
    assert sum(tensor.nbytes for tensor in kept) == spec.nbytes(parameter.numel())
    assert len(kept) == spec.tensors


@pytest.mark.parametrize(
    ("name", "dtype", "gradient", "per_element"),
    [
        ("adamw", "float32", "float32", 28),  # parameter, gradient and two moments read, all but the gradient written
        ("adamw", "bfloat16", "bfloat16", 14),
        ("adamw", "bfloat16", "float32", 16),
        ("sgd", "float32", "float32", 12),
        ("sgd_momentum", "float32", "float32", 20),
        ("adamw_mixed", "float32", "float32", 28),
        ("adamw_mixed", "bfloat16", "bfloat16", 28),  # 2 gradient, 2 parameter, 12 read and 12 written in 32 bits
        ("adamw_mixed", "bfloat16", "float32", 30),
        ("adamw_mixed", "float16", "float16", 28),
    ],
)
def test_bytes_that_an_update_moves(name, dtype, gradient, per_element):
    assert optimizer_named(name).moved_bytes(dtype, 1000, gradient) == 1000 * per_element


def test_a_parameter_of_32_bits_needs_no_master_copy():
    mixed, plain = optimizer_named("adamw_mixed"), optimizer_named("adamw")
    for dtype in ("float32", "float64"):
        assert mixed.state(dtype) == plain.state(dtype)
        assert mixed.workspace(dtype, dtype) == plain.workspace(dtype, dtype)
    assert mixed.state("bfloat16") == Buffers(3, 4)


@pytest.mark.parametrize("gradient", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_space_holds_state_and_workspace_of_every_layout(name, gradient):
    reference = ModelReference("support.steps.models:gpt", batch=4, sequence=16)
    step = load_step(reference)
    step.module.to(torch.bfloat16)
    traced = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn, gradient)
    costs, spec = CostModel(load_cluster("a100-8-nvlink"), (2,)), optimizer_named(name)
    model = build_strategy_space(traced, costs, (2,), spec).model
    trained = [node for node in model.nodes if node.kind is NodeKind.PARAMETER]
    assert len(trained) == len(traced.graph.parameters)
    for node, value in zip(trained, traced.graph.parameters, strict=True):
        assert value.spec.dtype == "bfloat16"
        per_element = 2 + spec.state("bfloat16").nbytes(1)
        numel = node.resident_bytes // per_element
        assert set(numel.tolist()) <= {value.spec.numel, value.spec.numel // 2}
        assert (node.resident_bytes == numel * per_element).all()
        assert (node.update_bytes == numel * spec.workspace("bfloat16", gradient).nbytes(1)).all()
        seconds = [costs.update_seconds(int(n), "bfloat16", gradient, name) for n in numel]
        assert (node.update_cost == to_quanta(seconds)).all()


def test_a_frozen_parameter_keeps_nothing():
    traced = traced_step("lora_gpt")
    costs = CostModel(load_cluster("a100-8-nvlink"), (2,))
    model = build_strategy_space(traced, costs, (2,), optimizer_named("adamw")).model
    frozen = {value.name: value.spec.nbytes for value in traced.graph.parameters if not value.trainable}
    nodes = [node for node in model.nodes if node.name in frozen]
    assert nodes
    for node in nodes:
        assert int(node.resident_bytes[0]) == frozen[node.name]
        assert node.update_bytes is None


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(OptimizerError, match=r"'lion' is not known; choose one of adamw, sgd, sgd_momentum"):
        optimizer_named("lion")
