"""The order of copies and computation on streams, as on CUDA: every wait is needed, and together they suffice."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from support.layers.racing_streams import RacingStreams, Stream

from runtime.measure.host_copies import HostCopies

WAITS = ("out", "out", "let go", "in for the computation", "in for the copy out", "settle", "read")
"""Waits of :func:`there_and_back`, in their order."""


def there_and_back(racing: RacingStreams) -> torch.Tensor:
    """Two tensors leave, and the second comes back before the computation knows that it left."""
    copies = HostCopies(torch.device("cpu"))
    copies.overlaps = True
    with racing:
        host, left = None, None
        for size in (3, 4):
            source = torch.arange(size) * 2.0
            host, left = copies.offload(source)
            copies.let_go(source, left)
            del source
        assert host is not None
        back, came = copies.prefetch(host, left)
        copies.settle()
        copies.wait(back, came)
        found = back + 1
        del back
    return found


def test_copies_and_the_computation_wait_for_one_another(monkeypatch):
    racing = RacingStreams(monkeypatch)
    assert there_and_back(racing).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert racing.races == []
    assert racing.copies == 3


@pytest.mark.parametrize("joins", [True, False])
def test_after_an_error_the_computation_waits_for_what_is_under_way(joins, monkeypatch):
    racing, copies = RacingStreams(monkeypatch), HostCopies(torch.device("cpu"))
    copies.overlaps = True
    with racing:
        source = torch.arange(3) * 2.0
        host, left = copies.offload(source)
        copies.let_go(source, left)
        back, _ = copies.prefetch(host, left)
        if joins:
            copies.join()
        del source, back, copies
    assert bool(racing.races) is not joins


@pytest.mark.parametrize("left_out", range(len(WAITS)))
def test_no_wait_can_be_left_out(left_out, monkeypatch):
    numbers, learn = count(), Stream.learn
    monkeypatch.setattr(Stream, "learn", lambda *given: next(numbers) == left_out or learn(*given))
    racing = RacingStreams(monkeypatch)
    there_and_back(racing)
    assert next(numbers) == len(WAITS)
    assert racing.races, f"nobody noticed that the wait {WAITS[left_out]!r} was left out"
