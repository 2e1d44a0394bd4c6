"""Copies between a device and its host's memory, beside the computation where the device can.

On CUDA the copies run on two streams of their own, one per direction, from and to pinned memory; events synchronize
them with the computation exactly where :mod:`planner.schedule.instructions` defines it. All device memory is allocated
on the compute stream, which waits for a copy before it reads or frees its buffers, so the allocator needs no record of
the other streams. Elsewhere a copy is done when the call returns.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from planner.torch_adapter.meters.storage_meter import counted_on_host
from runtime.measure.host_arena import HostArena


class HostCopies:
    """Starts copies and waits for them; one per rank.

    Parameters
    ----------
    device
        Where the computation runs.
    arena
        Where host buffers lie whose place is planned; None: torch allocates each, and pins it on CUDA.
    """

    def __init__(self, device: torch.device, arena: HostArena | None = None) -> None:
        self._device, self._arena = device, arena
        self.overlaps = device.type == "cuda"
        """Whether copies run beside the computation."""
        self._leaving: list[tuple[Tensor, torch.cuda.Event]] = []

    @cached_property
    def _outward(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @cached_property
    def _inward(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def offload(self, source: Tensor, buffer: int | None = None) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start a copy to the host.

        Parameters
        ----------
        source
            Tensor on the device.
        buffer
            The host buffer of the schedule that it fills, which has a place in the arena.

        Returns
        -------
        tuple
            The host tensor, with the strides of ``source``, and the handle for :meth:`wait`.
        """
        with counted_on_host():
            if self._arena is None or buffer is None:
                host = torch.empty_like(source, device="cpu", pin_memory=self.overlaps)
            else:
                host = self._arena.tensor(buffer, source)
        if not self.overlaps:
            return host.copy_(source), None
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            host.copy_(source, non_blocking=True)
            return host, self._outward.record_event()

    def prefetch(self, host: Tensor, offloaded: torch.cuda.Event | None) -> tuple[Tensor, torch.cuda.Event | None]:
        """Allocate a device tensor and start a copy of a host tensor into it.

        Parameters
        ----------
        host, offloaded
            Results of :meth:`offload`.

        Returns
        -------
        tuple
            The device tensor and the handle for :meth:`wait`.
        """
        target = torch.empty_like(host, device=self._device, pin_memory=False)
        if offloaded is None:
            return target.copy_(host), None
        self._inward.wait_stream(torch.cuda.current_stream(self._device))
        self._inward.wait_event(offloaded)
        with torch.cuda.stream(self._inward):
            target.copy_(host, non_blocking=True)
            return target, self._inward.record_event()

    def let_go(self, tensor: Tensor, copied: torch.cuda.Event | None) -> None:
        """Free a tensor on the device after its copy to the host, which goes on beside the computation.

        It lives until the next one is let go, or until :meth:`settle`: the computation waits for its copy there, and
        only then may the allocator give its memory to the computation.

        Parameters
        ----------
        tensor, copied
            Argument and handle of :meth:`offload`.
        """
        if copied is None:
            return
        leaving, self._leaving = self._leaving, [(tensor, copied)]
        for earlier, done in leaving:
            self.wait(earlier, done)

    def settle(self) -> None:
        """Let the computation wait for the copies of all tensors that were let go, which are freed with that."""
        leaving, self._leaving = self._leaving, []
        for tensor, done in leaving:
            self.wait(tensor, done)

    def join(self) -> None:
        """Let the computation wait for all copies, where a step has ended: an error may have left some under way.

        The tensors that others hold must live until then; those that were let go are freed with that.
        """
        if self.overlaps:
            compute = torch.cuda.current_stream(self._device)
            for side in (self._outward, self._inward):
                compute.wait_stream(side)
        self._leaving = []

    def wait(self, tensor: Tensor, *copies: torch.cuda.Event | None) -> None:
        """Let the computation wait for copies that read or write ``tensor``, which lives until then."""
        del tensor
        if self.overlaps:
            compute = torch.cuda.current_stream(self._device)
            for done in copies:
                if done is not None:
                    compute.wait_event(done)
