"""A copy engine of the CPU whose copies take as long as they may: they are done when they are waited for."""

from __future__ import annotations

import weakref

import torch

from runtime.measure.host_copies import HostCopies


class LateCopy:
    """A copy that is made when somebody waits for it; until then nobody else may have the memory of its source."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source, self._target = weakref.ref(source), weakref.ref(target)
        self.is_done = False

    def finish(self) -> None:
        if self.is_done:
            return
        source, target = self._source(), self._target()
        assert source is not None, "the source was freed before it was copied"
        if target is not None:
            target.copy_(source)
        self.is_done = True


class Fetch(LateCopy):
    """A copy to the device, where nobody else may have the target's memory either."""


class LateCopies(HostCopies):
    """A copy engine as slow as CUDA's streams allow; counts sources alive beside the one that is copied."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.overlaps = True
        self.most_leaving = self.offloaded = 0
        self.log: list[str] = []
        """Fetches as they start, waits for them, and what the computation adds."""
        self.freed_early = 0
        """Tensors on the device that were freed while they were being filled."""
        self._started: list[LateCopy] = []

    def offload(self, source, buffer=None):
        host = torch.full_like(source, float("nan"))
        self.offloaded += 1
        return host, self._start(LateCopy(source, host))

    def prefetch(self, host, offloaded):
        offloaded.finish()
        target = torch.full_like(host, float("nan"))
        self.log.append("fetch")
        fetch = Fetch(host, target)
        weakref.finalize(target, self._note, fetch)
        return target, self._start(fetch)

    def _start(self, copy: LateCopy) -> LateCopy:
        self._started = [each for each in (*self._started, copy) if not each.is_done]
        return copy

    def join(self):
        self.wait(None, *(copy for copy in self._started if not copy.is_done))
        self._leaving = []

    def _note(self, fetch: Fetch) -> None:
        self.freed_early += not fetch.is_done

    def let_go(self, tensor, copied):
        super().let_go(tensor, copied)
        self.most_leaving = max(self.most_leaving, len(self._leaving))

    def wait(self, tensor, *copies):
        for copy in copies:
            if isinstance(copy, Fetch):
                self.log.append("wait")
            copy.finish()
