"""Hidden states on the host, with copies that take as long as they may: done when they are waited for, not before."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from planner.layers.plan.document import LayerSettings
from runtime.layers.memory import keep_as_planned
from runtime.measure.host_copies import HostCopies


class LateCopy:
    """A copy that reads its source when somebody waits for it; until then nobody else may have its memory."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source, self._target, self._done = weakref.ref(source), target, False

    def finish(self) -> None:
        if self._done:
            return
        source = self._source()
        assert source is not None, "the source was freed before it was copied"
        self._target.copy_(source)
        self._done = True


class LateCopies(HostCopies):
    """A copy engine as slow as CUDA's streams allow; counts sources alive beside the one that is copied."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.most_leaving = 0

    def offload(self, source):
        host = torch.full_like(source, float("nan"))
        return host, LateCopy(source, host)

    def prefetch(self, host, offloaded):
        offloaded.finish()
        target = torch.full_like(host, float("nan"))
        return target, LateCopy(host, target)

    def let_go(self, tensor, copied):
        super().let_go(tensor, copied)
        self.most_leaving = max(self.most_leaving, len(self._leaving))

    def wait(self, tensor, *copies):
        for copy in copies:
            copy.finish()


def layers(copies: HostCopies | None) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)))
    if copies is not None:
        for layer in made:
            keep_as_planned(layer, LayerSettings(name="layer", offload_hidden=True), copies)
    return made


def gradients(module: nn.Module) -> list[torch.Tensor]:
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    module(rows * 1.0).square().sum().backward()
    return [rows.grad, *(parameter.grad for parameter in module.parameters())]


def test_a_hidden_state_lives_until_it_has_been_copied():
    copies = LateCopies()
    found, expected = gradients(layers(copies)), gradients(layers(None))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert copies.most_leaving == 1, "one copy goes on beside the computation, and holds its tensor"


def test_the_double_notices_a_source_that_is_dropped(monkeypatch):
    monkeypatch.setattr(LateCopies, "let_go", lambda *_: None)
    with pytest.raises(AssertionError, match="freed before it was copied"):
        gradients(layers(LateCopies()))
