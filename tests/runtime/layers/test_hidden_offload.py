"""Hidden states on the host, with copies that take as long as they may: done when they are waited for, not before."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from planner.layers.plan.document import LayerSettings
from runtime.layers.memory import HiddenOffload, keep_as_planned
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

    overlaps = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.most_leaving = 0
        self.log: list[str] = []
        """Fetches as they start, waits for them, and what the computation adds."""

    def offload(self, source):
        host = torch.full_like(source, float("nan"))
        return host, LateCopy(source, host)

    def prefetch(self, host, offloaded):
        offloaded.finish()
        target = torch.full_like(host, float("nan"))
        self.log.append("fetch")
        return target, Fetch(host, target)

    def let_go(self, tensor, copied):
        super().let_go(tensor, copied)
        self.most_leaving = max(self.most_leaving, len(self._leaving))

    def wait(self, tensor, *copies):
        for copy in copies:
            if isinstance(copy, Fetch):
                self.log.append("wait")
            copy.finish()


class Fetch(LateCopy):
    """A copy to the device."""


class Noted(torch.autograd.Function):
    """The identity, which saves its input and writes its backward into a log."""

    @staticmethod
    def forward(ctx, rows, log, reads):
        ctx.save_for_backward(rows)
        ctx.log, ctx.reads = log, reads
        return rows * 1.0

    @staticmethod
    def backward(ctx, gradient):
        if ctx.reads:
            assert not ctx.saved_tensors[0].isnan().any()
        ctx.log.append("compute")
        return gradient, None, None


class Identity(nn.Module):
    """A layer of one :class:`Noted`."""

    def __init__(self, log: list[str], *, reads: bool = True) -> None:
        super().__init__()
        self._log, self._reads = log, reads

    def forward(self, rows):
        return Noted.apply(rows, self._log, self._reads)


def log_of(reads: list[bool]) -> list[str]:
    """What happens in backward of layers of which some read what they saved."""
    copies = LateCopies()
    made = nn.Sequential(*(Identity(copies.log, reads=each) for each in reads))
    hidden = HiddenOffload(copies)
    for layer in made:
        keep_as_planned(layer, LayerSettings(name="layer", offload_hidden=True), hidden)
    made(torch.ones(4, requires_grad=True)).sum().backward()
    return copies.log


def layers(copies: HostCopies | None) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)))
    if copies is not None:
        hidden = HiddenOffload(copies)
        for layer in made:
            keep_as_planned(layer, LayerSettings(name="layer", offload_hidden=True), hidden)
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


def test_the_next_hidden_state_is_fetched_while_backward_computes():
    assert log_of([True] * 3) == ["fetch", "wait", "fetch", "compute", "wait", "fetch", "compute", "wait", "compute"]


def test_a_fetched_state_that_backward_does_not_ask_for_is_freed_after_its_copy():
    """The third layer's state is fetched first, then the second's, which is waited for and not read."""
    expected = ["fetch", "wait", "fetch", "compute", "compute", "wait", "fetch", "wait", "compute"]
    assert log_of([True, False, True]) == expected


def test_without_streams_one_state_is_on_the_device(monkeypatch):
    monkeypatch.setattr(LateCopies, "overlaps", False)
    assert log_of([True] * 2) == ["fetch", "wait", "compute"] * 2
