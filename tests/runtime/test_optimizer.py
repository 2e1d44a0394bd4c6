from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.optimizers import OptimizerError, optimizer_named
from planner.torch_adapter.storage_meter import StorageMeter
from runtime.optimizer import LocalOptimizer, whole_model_optimizer


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_shards_are_updated_as_the_whole_parameter_would_be(name):
    torch.manual_seed(0)
    module = nn.Linear(6, 8)
    whole = {key: value.detach().clone() for key, value in module.named_parameters()}
    shards = {"weight": whole["weight"][4:].clone(), "bias": whole["bias"][4:].clone()}
    local, reference = LocalOptimizer(name, shards), whole_model_optimizer(name, module)
    for step in range(3):
        gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).t().contiguous().t()
        module.weight.grad, module.bias.grad = gradient.clone(), gradient[:, 0].clone()
        reference.step()
        local.begin_step()
        local.update("weight", gradient[4:])
        local.update("bias", gradient[4:, 0])
    torch.testing.assert_close(shards["weight"], module.weight[4:].detach(), rtol=0, atol=0)
    torch.testing.assert_close(shards["bias"], module.bias[4:].detach(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("transposed", [False, True])
def test_memory_of_an_update_is_what_the_plan_charges(name, transposed):
    parameter = torch.randn(128, 96)
    gradient = torch.randn(96, 128).t() if transposed else torch.randn(128, 96)
    spec = optimizer_named(name)
    optimizer = LocalOptimizer(name, {"weight": parameter})
    assert sum(t.nbytes for t in optimizer.state_tensors()) == spec.state_tensors * parameter.nbytes
    with StorageMeter() as meter:
        meter.track(parameter, gradient, *optimizer.state_tensors())
        before = meter.live_bytes
        optimizer.begin_step()
        optimizer.update("weight", gradient)
    # AdamW's step count is a tensor of four bytes that lives during an update.
    assert meter.peak_bytes - before - spec.workspace_tensors * parameter.nbytes in (0, 4, 8)
    assert meter.live_bytes == before


def test_unknown_optimizer_is_refused():
    with pytest.raises(OptimizerError, match=r"'lion' is not known; choose one of adamw, sgd"):
        LocalOptimizer("lion", {})
    with pytest.raises(OptimizerError, match=r"'lion'"):
        whole_model_optimizer("lion", nn.Linear(1, 1))
