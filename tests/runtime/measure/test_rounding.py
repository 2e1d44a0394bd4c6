"""The check against one process: rounding passes in every dtype, and what is wrong fails in every dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.steps.planned_steps import step_reference
from torch import nn

from planner.models.references import load_step
from planner.torch_adapter.local.collectives import MeshGroups
from planner.torch_adapter.tracing.step_module import step_loss
from runtime.measure.comparison import ReferenceComparison
from runtime.measure.reference import prepare, prepare_rounding, read_reference
from runtime.measure.rounding import (
    GRADIENT_TOLERANCE,
    MOST_ROUNDING,
    NO_ROUNDING,
    Rounding,
    loss_error,
    read_rounding,
    worst_of,
)

DTYPES = ("float32", "bfloat16", "float16")


def halves(reference):
    """Losses and gradients of the halves of the batch, as two ranks of data parallelism have them."""
    found = []
    for half in range(2):
        step = load_step(reference, "cpu")
        rows = slice(half * reference.batch // 2, (half + 1) * reference.batch // 2)
        args = [tensor[rows] for tensor in step.example_args]
        kwargs = {name: tensor[rows] for name, tensor in step.example_kwargs.items()}
        loss = step_loss(step.module, args, kwargs, step.loss_fn)
        (loss / 2).backward()
        found.append((loss.item(), {name: p.grad for name, p in step.module.named_parameters() if p.grad is not None}))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_halves_of_a_batch_pass_and_every_mutation_of_a_gradient_fails(dtype, tmp_path):
    reference = replace(step_reference("gpt"), dtype=dtype, batch=4)
    prepare(reference, "sgd", 1, None, tmp_path)
    prepare_rounding(reference, None, tmp_path)
    run, rounding = read_reference(tmp_path), read_rounding(tmp_path)
    comparison = ReferenceComparison(run, dict.fromkeys(run.gradients, ("R",)), MeshGroups((2,), (0,), ("",)))
    (first_loss, first), (second_loss, second) = halves(reference)
    summed = {name: first[name] + second[name] for name in first}
    worst = worst_of(comparison.gradients(summed), rounding)
    assert worst.error <= worst.tolerance, worst
    assert loss_error((first_loss + second_loss) / 2, run.losses[0]) <= rounding.loss_tolerance
    mutated = 0
    for name, gradient in summed.items():
        if float(run.gradients[name].abs().max()) < 1e-3 * run.gradient_scale:
            continue  # close to rounding noise alone
        mutated += 1
        for wrong in (-gradient, torch.zeros_like(gradient), first[name]):
            found = worst_of(comparison.gradients({**summed, name: wrong}), rounding)
            assert found.name == name
            assert found.error > found.tolerance, (name, found)
    assert mutated >= len(summed) // 2


def convolution(batch=64):
    """The gradient of the convolution's bias is rounding alone: the norm takes every bias away."""
    layers = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))
    )
    images = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return layers, (images,), {"target": torch.arange(batch) % 8}, nn.functional.cross_entropy


def test_a_gradient_of_rounding_noise_is_measured_by_its_own_rounding(tmp_path):
    reference = replace(step_reference("gpt"), source=f"{__name__}:convolution", batch=64)
    prepare(reference, "sgd", 1, None, tmp_path)
    prepare_rounding(reference, None, tmp_path)
    run, rounding = read_reference(tmp_path), read_rounding(tmp_path)
    comparison = ReferenceComparison(run, dict.fromkeys(run.gradients, ("R",)), MeshGroups((2,), (0,), ("",)))
    step = load_step(reference, "cpu")
    flipped = [tensor.flip(0) for tensor in step.example_args]
    step_loss(step.module, flipped, {"target": step.example_kwargs["target"].flip(0)}, step.loss_fn).backward()
    errors = comparison.gradients({name: parameter.grad for name, parameter in step.module.named_parameters()})
    noisy = "0.bias"
    assert errors[noisy] > GRADIENT_TOLERANCE, "the case shows nothing without noise above the usual tolerance"
    assert max(error for name, error in errors.items() if name != noisy) <= GRADIENT_TOLERANCE
    assert worst_of(errors).name == noisy
    worst = worst_of(errors, rounding)
    assert worst.error <= worst.tolerance
    assert rounding.tolerance("0.weight") < 1e-3


def test_a_gradient_that_lost_little_by_chance_may_lose_what_others_do():
    half = Rounding(0.0, {"lucky": 2e-3, **{f"usual {k}": 1e-2 + 1e-3 * k for k in range(18)}, "alone": 0.5})
    assert half.tolerance("lucky") == pytest.approx(3 * 2.6e-2)
    single = Rounding(0.0, {"lucky": 1e-8, **{f"usual {k}": 1e-7 * k for k in range(18)}, "alone": 0.5})
    assert single.tolerance("lucky") == GRADIENT_TOLERANCE


def test_tolerances_have_a_floor_and_a_ceiling():
    rounding = Rounding(0.5, {"a": 0.0, "b": 1e-2, "c": 1.0})
    assert rounding.tolerance("a") == rounding.tolerance("b") == pytest.approx(3e-2)
    assert rounding.tolerance("c") == pytest.approx(3.0)
    assert rounding.loss_tolerance == Rounding(0.0, {"a": 0.2, "b": 0.9}).tolerance("b") == MOST_ROUNDING
    assert NO_ROUNDING.tolerance("a") == GRADIENT_TOLERANCE
    assert worst_of({"a": 0.1, "c": 2.0}, rounding).name == "a"
