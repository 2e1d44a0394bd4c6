"""Optimizers by what they do to elements: those that are refused, and the bytes that each takes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, NAdam, RMSprop

from runtime.library.optimizers.probe import (
    ElementBytes,
    OptimizerRefusedError,
    check_element_wise,
    element_bytes,
)

CPU = torch.device("cpu")
NAMES = {"bias": 1, "weight": 2, "kernel": 4, "scale": 0}


class TrustRatio(torch.optim.Optimizer):
    """A step scaled by the parameter's norm, as LARS (You et al. 2017) does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["lr"] * parameter.norm() / parameter.grad.norm() * parameter.grad


def no_decay_of_biases(named):
    decayed = [entry for entry in named if entry[1].ndim > 1]
    others = [entry for entry in named if entry[1].ndim <= 1]
    return AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3)


@pytest.mark.parametrize(
    "factory",
    [
        *(SGD, Adagrad, NAdam, partial(RMSprop, centered=True), partial(AdamW, lr=1e-6), partial(AdamW, fused=True)),
        *(partial(AdamW, foreach=True), partial(SGD, momentum=0.9, nesterov=True), no_decay_of_biases),
    ],
)
def test_element_wise_optimizers_pass(factory):
    check_element_wise(factory, NAMES, CPU)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Adafactor, "Adafactor is not element-wise: two halves of a parameter like"),
        (TrustRatio, "TrustRatio is not element-wise"),
        (Muon, "Muon cannot be made from named parameters .*2D parameters"),
        (torch.optim.LBFGS, r"LBFGS fails on .* closure"),
        (torch.optim.SparseAdam, "SparseAdam fails on .*dense gradients"),
        (partial(AdamW, rate=1), "AdamW cannot be made from named parameters .*rate"),
        (lambda named: None, "returned a NoneType: give one that makes a torch.optim.Optimizer"),
    ],
)
def test_others_are_refused_with_the_reason(factory, message):
    with pytest.raises(OptimizerRefusedError, match=message):
        check_element_wise(factory, NAMES, CPU)


@pytest.mark.parametrize(
    ("factory", "dtype", "state", "workspace"),
    [
        (AdamW, torch.float32, 8, 8),
        (partial(AdamW, amsgrad=True), torch.float32, 12, 8),
        (partial(AdamW, fused=True), torch.float32, 8, 0),
        (AdamW, torch.bfloat16, 4, 4),
        (SGD, torch.float32, 0, 0),
        (partial(SGD, momentum=0.9), torch.float32, 4, 0),
        (Adam, torch.float64, 16, 16),
    ],
)
def test_bytes_of_an_element(factory, dtype, state, workspace):
    assert element_bytes(factory, NAMES, "weight", dtype, CPU) == ElementBytes(state, workspace)
