"""Hidden states on the host, with copies that take as long as they may: done when they are waited for, not before."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from support.layers.late_copies import LateCopies
from support.layers.layer_runs import failed_step_on_rank, names_of, planned_model, staged_plan
from support.layers.racing_streams import RacingStreams
from torch import nn

from planner.layers.plan.document import LayerSettings
from runtime.layers.memory import HiddenOffload, keep_as_planned
from runtime.measure.host_copies import HostCopies


class Noted(torch.autograd.Function):
    """The identity, which saves its input, scaled, some times and writes its backward into a log."""

    @staticmethod
    def forward(ctx, rows, log, saves):
        ctx.save_for_backward(*(rows * 1.0 for _ in range(saves)))
        ctx.log = log
        return rows * 1.0

    @staticmethod
    def backward(ctx, gradient):
        assert not any(saved.isnan().any() for saved in ctx.saved_tensors)
        ctx.log.append("compute")
        return gradient, None, None


class Identity(nn.Module):
    """A layer of one :class:`Noted`."""

    def __init__(self, log: list[str], saves: int) -> None:
        super().__init__()
        self._log, self._saves = log, saves

    def forward(self, rows):
        return Noted.apply(rows, self._log, self._saves)


def identities(saves: list[int], copies: LateCopies, hidden: HiddenOffload | None = None) -> nn.Sequential:
    """Layers that save some tensors."""
    made = nn.Sequential(*(Identity(copies.log, each) for each in saves))
    hidden = HiddenOffload(copies) if hidden is None else hidden
    for layer in made:
        keep_as_planned(layer, LayerSettings(name="layer", offload_hidden=True), hidden)
    return made


def logs_of(made: nn.Sequential, copies: LateCopies) -> list[list[str]]:
    """What happens in the first backward, and in the second."""
    logs = []
    for _ in range(2):
        made(torch.ones(4, requires_grad=True)).sum().backward()
        logs.append(copies.log.copy())
        copies.log.clear()
    return logs


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


ALONE = ["fetch", "wait", "compute"]


def test_the_next_hidden_state_is_fetched_while_backward_computes():
    first, second = logs_of(identities([1] * 3, copies := LateCopies()), copies)
    assert first == ALONE * 3, "the order of a backward is not known before it"
    assert second == ["fetch", "wait", "fetch", "compute", "wait", "fetch", "compute", "wait", "compute"]


def test_a_node_is_given_what_it_saved_in_the_order_of_saving():
    """Every tensor is copied once, and all but the first while something else is done."""
    _, log = logs_of(identities([2, 3], copies := LateCopies()), copies)
    assert log.count("fetch") == log.count("wait") == 5
    assert log[:3] == ["fetch", "wait", "fetch"]
    waits = [place for place, each in enumerate(log) if each == "wait"]
    assert all(log[place + 1] == "fetch" for place in waits[:-1])
    assert log[-2:] == ["wait", "compute"]


def test_layers_of_several_kinds_have_their_gradients_and_copy_nothing_twice():
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)) for _ in range(3)))
    rows = torch.randn(8, 16)
    made(rows).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in made.parameters()]
    copies = LateCopies()
    hidden = HiddenOffload(copies)
    for layer in made:
        keep_as_planned(layer, LayerSettings(name="layer", offload_hidden=True), hidden)
    for _ in range(3):
        made.zero_grad()
        losses = [made(part).square().sum() for part in rows.chunk(2)]  # two micro-batches in flight
        for loss in losses:
            loss.backward()
        found = [parameter.grad for parameter in made.parameters()]
        assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(found, expected, strict=True))
        fetched = copies.log.count("fetch")
        copies.log.clear()
        assert fetched == copies.offloaded
        copies.offloaded = 0


def test_a_fetched_state_that_backward_does_not_ask_for_is_freed_after_its_copy():
    copies = LateCopies()
    first, second, third = made = identities([1] * 3, copies)
    logs_of(made, copies)
    between = second(first(torch.ones(4, requires_grad=True)))
    third(between.detach().requires_grad_()).sum().backward()
    assert copies.log == ["fetch", "wait", "fetch", "compute"], "the state of the second layer is fetched"
    del between
    first(torch.ones(4, requires_grad=True)).sum().backward()
    assert copies.log[4:] == ["wait", *ALONE]


def test_without_streams_one_state_is_on_the_device():
    copies = LateCopies()
    copies.overlaps = False
    assert logs_of(identities([1, 1], copies), copies) == [ALONE * 2] * 2


def fail(gradient):
    raise ZeroDivisionError


def half_a_backward(made: nn.Sequential) -> None:
    """A backward of two layers that fails between them."""
    first, second = made
    between = first(torch.ones(4, requires_grad=True))
    between.register_hook(fail)
    second(between).sum().backward()


def test_a_backward_that_fails_frees_what_was_fetched_after_its_copy():
    copies = LateCopies()
    hidden = HiddenOffload(copies)
    made = identities([1] * 2, copies, hidden)
    expected = logs_of(made, copies)[1]
    with pytest.raises(ZeroDivisionError), hidden.step():
        half_a_backward(made)
    assert copies.log == ["fetch", "wait", "fetch", "compute", "wait"]
    gc.collect()
    assert copies.freed_early == 0
    copies.log.clear()
    assert logs_of(made, copies)[0] == expected


def test_a_step_without_the_wait_is_noticed():
    copies = LateCopies()
    made = identities([1] * 2, copies)
    logs_of(made, copies)
    with pytest.raises(ZeroDivisionError):
        half_a_backward(made)
    del made
    gc.collect()
    assert copies.freed_early == 1


def test_a_backward_that_fails_shows_no_order():
    """Half an order would be kept for good, and the rest never fetched ahead."""
    copies = LateCopies()
    hidden = HiddenOffload(copies)

    class Pair(Identity):
        def forward(self, rows):
            between = super().forward(rows)
            between.register_hook(fail if fails else nn.Identity())
            return super().forward(between)

    fails, pair = True, Pair(copies.log, 1)
    keep_as_planned(pair, LayerSettings(name="layer", offload_hidden=True), hidden)
    with pytest.raises(ZeroDivisionError), hidden.step():
        pair(torch.ones(4, requires_grad=True)).sum().backward()
    fails = False
    copies.log.clear()
    for _ in range(2):
        copies.log.clear()
        pair(torch.ones(4, requires_grad=True)).sum().backward()
    assert copies.log == ["fetch", "wait", "fetch", "compute", "wait", "compute"]


def test_a_step_of_a_plan_that_fails_waits_for_its_copies(two_ranks):
    settings = [{"data_parallel": 2, "offload_hidden": True}] * len(names_of(planned_model("gpt2")))
    plan = staged_plan("gpt2", settings, devices=2)
    for log, freed_early in two_ranks.run(failed_step_on_rank, plan.model_dump_json()):
        assert log.count("fetch") == log.count("wait") > 0
        assert log[-1] == "wait"
        assert freed_early == 0


@pytest.mark.parametrize("fails", [False, True])
def test_streams_and_events_leave_no_race(fails, monkeypatch):
    """The engine itself, on streams that notice what could run at once."""
    copies, racing = HostCopies(torch.device("cpu")), RacingStreams(monkeypatch)
    copies.overlaps = True
    hidden, expected = HiddenOffload(copies), gradients(layers(None))
    module = layers(None)
    for layer in module:
        keep_as_planned(layer, LayerSettings(name="layer", offload_hidden=True), hidden)
    with racing:
        for number in range(3):
            with pytest.raises(ZeroDivisionError) if fails else nullcontext(), hidden.step():
                module.zero_grad()
                rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
                middle = module[1](module[0](rows * 1.0))
                if fails and number:
                    middle.register_hook(fail)
                module[2](middle).square().sum().backward()
                found = [rows.grad, *(parameter.grad for parameter in module.parameters())]
                assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
                if fails:
                    raise ZeroDivisionError
            del rows, middle
            gc.collect()
    assert racing.copies > 20
    assert racing.races == []
