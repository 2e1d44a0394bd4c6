"""Initial values that are recorded and made later: bit for bit those of a module that was built whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.models.families import FAMILIES, small_configuration
from planner.models.references import ModelReference, load_step
from planner.torch_adapter.deferred_values import deferred_parameters
from planner.torch_adapter.meters.storage_meter import StorageMeter

EVERY_FAMILY = [(family, differences) for families in FAMILIES.values() for family, differences in families.items()]


def built(build: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters and buffers of a module, and the random state after it was built."""
    torch.manual_seed(3)
    module = build()
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}, torch.get_rng_state()


def check_deferred(build: Callable[[], nn.Module]) -> None:
    expected, state = built(build)
    with deferred_parameters() as values:
        found, after = built(build)
    assert torch.equal(after, state)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        real = values.value(tensor) if tensor.is_meta else tensor
        assert real.dtype == expected[name].dtype
        assert torch.equal(real, expected[name]), name
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("family", [name for name, _ in EVERY_FAMILY])
def test_every_family_of_transformers(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_configuration(family, dict(EVERY_FAMILY)[family])))
    reference = ModelReference(f"hf:{tmp_path / 'config.json'}", batch=2, sequence=16)
    check_deferred(lambda: load_step(reference, "cpu").module)


class Unusual(nn.Module):
    """Parameters that come by their values in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(11)
        self.table = nn.Embedding(7, 4, padding_idx=2)
        self.given = nn.Parameter(torch.randn(3, 5) * 0.1 + 1.0)
        self.drawn = nn.Parameter(torch.empty(5, 3).t())
        nn.init.normal_(self.drawn, generator=own)
        self.square = nn.Linear(6, 6)
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.square.bias, std=0.5, a=-0.3, b=0.3)
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.table.weight
        self.copied = nn.Parameter(torch.zeros(6, 6))
        with torch.no_grad():
            self.copied.copy_(self.square.weight.t() * 2)
            self.square.weight.mul_(3)
            self.copied[1:3].uniform_(-1, 1)
            self.copied.copy_(self.copied.t().clone())
            self.copied.copy_(self.copied.flip(0) + self.copied)
            self.given.copy_(self.given)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        self.halved = nn.Linear(5, 5).to(torch.bfloat16)
        self.register_buffer("numbers", torch.rand(3))
        nn.init.sparse_(self.halved.weight.data.view(25, 1), 0.2)


def test_unusual_parameters() -> None:
    check_deferred(Unusual)


class RealMeter(StorageMeter):
    """Counts tensors that have memory."""

    def _count(self, tensor: Tensor, operator: object) -> None:
        if not tensor.is_meta:
            super()._count(tensor, operator)


def test_no_more_than_one_parameter_is_there_at_once() -> None:
    def build() -> nn.Module:
        layers = [nn.Linear(64, 64) for _ in range(8)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.1)
        return nn.Sequential(*layers)

    largest = 64 * 64 * 4
    meter = RealMeter()
    with meter, deferred_parameters() as values:
        module = build()
    assert meter.peak_bytes <= 2 * largest + 1024  # one that is registered, and numbers that are drawn
    meter = RealMeter()
    with meter:
        for parameter in module.parameters():
            values.value(parameter)
    assert meter.peak_bytes <= largest + 64 * 4


def test_a_value_that_is_forgotten_is_not_known() -> None:
    with deferred_parameters() as values:
        layer: Any = nn.Linear(2, 2)
    assert layer.weight in values
    values.forget(layer.weight)
    assert layer.weight not in values
    with pytest.raises(KeyError):
        values.value(layer.weight)


def test_parameters_outside_are_as_ever(tmp_path: Path) -> None:
    with deferred_parameters():
        inside = nn.Linear(2, 2)
    outside = nn.Linear(2, 2)
    assert inside.weight.is_meta
    assert not outside.weight.is_meta
