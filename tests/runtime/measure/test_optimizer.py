from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.graph.optimizers import OPTIMIZERS, OptimizerError, optimizer_named
from planner.torch_adapter.meters.storage_meter import StorageMeter
from runtime.measure.optimizer import HYPERPARAMETERS, MASTER, LocalOptimizer, whole_model_optimizer

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_are_updated_as_the_whole_parameter_would_be(name, dtype):
    torch.manual_seed(0)
    module = nn.Linear(6, 8, dtype=dtype)
    whole = {key: value.detach().clone() for key, value in module.named_parameters()}
    shards = {"weight": whole["weight"][4:].clone(), "bias": whole["bias"][4:].clone()}
    local, reference = LocalOptimizer(name, shards), whole_model_optimizer(name, module)
    for step in range(3):
        gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype).t().contiguous().t()
        module.weight.grad, module.bias.grad = gradient.clone(), gradient[:, 0].clone()
        reference.step()
        local.begin_step()
        local.update("weight", gradient[4:])
        local.update("bias", gradient[4:, 0])
    torch.testing.assert_close(shards["weight"], module.weight[4:].detach(), rtol=0, atol=0)
    torch.testing.assert_close(shards["bias"], module.bias[4:].detach(), rtol=0, atol=0)


def test_small_gradients_reach_a_master_copy_and_vanish_without_one():
    # Steps of 1e-3 beside 1: half the distance to the next number of bfloat16 below 1 is 2e-3.
    kept = {name: torch.ones(4, dtype=torch.bfloat16) for name in ("adamw", "adamw_mixed")}
    for name, parameter in kept.items():
        optimizer = LocalOptimizer(name, {"weight": parameter})
        for _ in range(8):
            optimizer.begin_step()
            optimizer.update("weight", torch.full((4,), 1e-2, dtype=torch.bfloat16))
        if name == "adamw_mixed":
            master = optimizer.state["weight"][MASTER]
            assert master.dtype == torch.float32
            torch.testing.assert_close(master, torch.full((4,), 1 - 8e-3), rtol=0, atol=1e-4)
            assert torch.equal(parameter, master.bfloat16())
    assert (kept["adamw"] == 1).all()
    assert (kept["adamw_mixed"] < 1).all()


def test_momentum_gathers_gradients():
    parameter, lr = torch.zeros(3), HYPERPARAMETERS["sgd_momentum"].lr
    optimizer = LocalOptimizer("sgd_momentum", {"weight": parameter})
    for _ in range(3):
        optimizer.begin_step()
        optimizer.update("weight", torch.ones(3))
    # Velocities 1, 1.9 and 2.71.
    torch.testing.assert_close(parameter, torch.full((3,), -lr * 5.61))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("transposed", [False, True])
def test_memory_of_an_update_is_what_the_plan_charges(name, transposed, dtype, wide):
    parameter = torch.randn(128, 96).to(dtype)
    made = torch.float32 if wide else dtype
    gradient = (torch.randn(96, 128).t() if transposed else torch.randn(128, 96)).to(made)
    spec, word = optimizer_named(name), str(dtype).removeprefix("torch.")
    optimizer = LocalOptimizer(name, {"weight": parameter})
    assert sum(t.nbytes for t in optimizer.state_tensors()) == spec.state(word).nbytes(parameter.numel())
    with StorageMeter() as meter:
        meter.track(parameter, gradient, *optimizer.state_tensors())
        before = meter.live_bytes
        optimizer.begin_step()
        optimizer.update("weight", gradient)
    # AdamW's step count is a tensor of four bytes that lives during an update.
    workspace = spec.workspace(word, str(made).removeprefix("torch.")).nbytes(parameter.numel())
    assert meter.peak_bytes - before - workspace in (0, 4, 8)
    assert meter.live_bytes == before


def test_unknown_optimizer_is_refused():
    with pytest.raises(
        OptimizerError, match=r"'lion' is not known; choose one of adamw, sgd, sgd_momentum, adamw_mixed"
    ):
        LocalOptimizer("lion", {})
    with pytest.raises(OptimizerError, match=r"'lion'"):
        whole_model_optimizer("lion", nn.Linear(1, 1))
