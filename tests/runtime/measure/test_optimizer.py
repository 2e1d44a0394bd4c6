from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

import runtime.measure.optimizer as optimizer_module
from planner.graph.optimizers import OPTIMIZERS, OptimizerError, optimizer_named
from planner.torch_adapter.meters.storage_meter import StorageMeter
from runtime.measure.optimizer import (
    HYPERPARAMETERS,
    MASTER,
    LocalOptimizer,
    whole_model_optimizer,
)
from runtime.measure.update_groups import UpdateMemory, ends_of_groups

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
        # Autograd lays gradients as their parameters lie; a fused kernel of torch does not look.
        laid_out = gradient.contiguous() if name.startswith("adamw") else gradient.clone()
        module.weight.grad, module.bias.grad = laid_out, gradient[:, 0].contiguous()
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
@pytest.mark.parametrize("fused", [False, True])
def test_memory_of_an_update_is_what_the_plan_charges(name, fused, transposed, dtype, wide):
    parameter = torch.randn(128, 96).to(dtype)
    made = torch.float32 if wide else dtype
    gradient = (torch.randn(96, 128).t() if transposed else torch.randn(128, 96)).to(made)
    spec, word = optimizer_named(name, fused=fused), str(dtype).removeprefix("torch.")
    optimizer = LocalOptimizer(name, {"weight": parameter}, fused=fused)
    assert sum(t.nbytes for t in optimizer.state_tensors()) == spec.state(word).nbytes(parameter.numel())
    with StorageMeter() as meter:
        meter.track(parameter, gradient, *optimizer.state_tensors())
        before = meter.live_bytes
        optimizer.begin_step()
        optimizer.update("weight", gradient)
    # AdamW's step count is a tensor of four bytes that lives during an update.
    workspace = spec.workspace(word, str(made).removeprefix("torch."), not transposed).nbytes(parameter.numel())
    assert meter.peak_bytes - before - workspace in (0, 4, 8)
    assert meter.live_bytes == before


def test_unknown_optimizer_is_refused():
    with pytest.raises(
        OptimizerError, match=r"'lion' is not known; choose one of adamw, sgd, sgd_momentum, adamw_mixed"
    ):
        LocalOptimizer("lion", {})
    with pytest.raises(OptimizerError, match=r"'lion'"):
        whole_model_optimizer("lion", nn.Linear(1, 1))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_at_once_have_the_bits_of_updates_one_by_one_and_their_peak(name, dtype, wide, monkeypatch):
    calls = []
    fused = optimizer_module.adamw
    monkeypatch.setattr(
        optimizer_module, "adamw", lambda parameters, *rest, **how: calls.append(fused(parameters, *rest, **how))
    )
    sizes = [(64, 32), (7,), (32, 32), (1,), (32,), (16, 16), (5, 3), (9,)]
    whole = {f"p{at}": torch.randn(size).to(dtype) for at, size in enumerate(sizes)}
    made = torch.float32 if wide else dtype
    found, peaks, counts = [], [], []
    for last in (False, True):
        parameters = {key: value.clone() for key, value in whole.items()}
        optimizer = LocalOptimizer(name, parameters)
        optimizer.at_once = last  # as on CUDA
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            gradients = {key: torch.randn(p.shape, generator=generator).to(made) for key, p in parameters.items()}
            calls.clear()
            with StorageMeter() as meter:
                meter.track(*parameters.values(), *gradients.values(), *optimizer.state_tensors())
                start = meter.live_bytes
                optimizer.begin_step()
                for key in list(gradients):
                    optimizer.update(key, gradients.pop(key))
                optimizer.end_step()
            peaks.append(meter.peak_bytes - start)
        found.append({**parameters, **{f"{k} {s}": t for k in parameters for s, t in optimizer.state_of(k).items()}})
        counts.append(len(calls))
    assert all(torch.equal(tensor, found[1][key]) for key, tensor in found[0].items())
    spec, words = optimizer_named(name), [str(each).removeprefix("torch.") for each in (dtype, made)]
    planned, freed = 0, 0
    for parameter in whole.values():
        planned = max(planned, spec.workspace(*words).nbytes(parameter.numel()) - freed)
        freed += parameter.numel() * made.itemsize
    assert max(peaks) <= planned + 4 * len(sizes)  # a count of four bytes for each parameter of a group
    if name.startswith("adamw"):
        assert counts[0] == len(sizes)
        assert counts[1] < len(sizes)


def test_groups_of_updates_stay_below_the_peak_of_single_ones():
    random = Random(0)
    for _ in range(2000):
        updates = [
            UpdateMemory(
                f"p{at}",
                random.randrange(9),
                copied := random.choice((0, random.randrange(9))),
                copied * random.choice((1, 3)),
            )
            for at in range(random.randrange(1, 9))
        ]
        ends = ends_of_groups(updates)
        total = sum(update.gradient for update in updates)
        single, alive = 0, total
        for update in updates:
            single, alive = max(single, alive + update.planned), alive - update.gradient
        peak, alive, group = 0, total, []
        for update in updates:
            group.append(update)
            if update.name in ends:
                peak = max(peak, alive + sum(each.copied for each in group))
                alive, group = alive - sum(each.gradient for each in group), []
        assert not group
        assert peak <= max(single, total)


def test_a_large_update_first_lets_all_others_be_made_at_once():
    large, small = UpdateMemory("large", 10, 20, 60), [UpdateMemory(f"small {at}", 1, 2, 6) for at in range(5)]
    assert ends_of_groups([large, *small]) == {"small 4"}
    assert ends_of_groups([*small, large]) >= {"large"}


@pytest.mark.parametrize("name", ["adamw", "adamw_mixed"])
def test_master_copies_of_the_whole_model_keep_no_gradient(name):
    module = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = whole_model_optimizer(name, module)
    module(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    kept = [p.grad for group in optimizer.param_groups for p in group["params"] if p.dtype == torch.float32]
    assert len(kept) == (2 if name == "adamw_mixed" else 0)
    assert all(gradient is None for gradient in kept)
