"""Bytes of live tensor storages on CPU, where torch keeps no allocation record.

A dispatch mode watches every operator: a new storage is counted once, and a weak reference takes it off
when the storage dies. What operators allocate and free inside themselves is not seen.

Where the device is the CPU, offloaded tensors lie in the same memory as all others: :func:`counted_on_host` marks
them, and they are counted separately.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_SETTLE_SECONDS, _SETTLE_TRIES = 1e-3, 5
_on_host: ContextVar[bool] = ContextVar("_on_host", default=False)


@contextmanager
def counted_on_host() -> Iterator[None]:
    """Count the storages that are made inside as host memory, not as the device's."""
    token = _on_host.set(True)
    try:
        yield
    finally:
        _on_host.reset(token)


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages of the tensors that operators return while the mode is on.

    It slows a step down; once entered and left it can be entered again and goes on counting.

    Attributes
    ----------
    live_bytes
        Bytes alive now.
    peak_bytes
        Most bytes alive at once.
    peak_operator
        Operator whose result reached the peak.
    host_live_bytes, host_peak_bytes
        The same of storages that were made inside :func:`counted_on_host`, which the others leave out.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_operator = ""
        self.host_live_bytes = 0
        self.host_peak_bytes = 0
        self._live: dict[int, weakref.ref[Any]] = {}
        self._unsettled = False

    def track(self, *tensors: Tensor) -> None:
        """Count tensors that no operator returned while the mode was on."""
        for tensor in tensors:
            self._count(tensor, "before the step")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code that ``torch.compile`` made run as compiled, so that it is what is metered."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator and count the storages it returns."""
        result = func(*args, **(kwargs or {}))
        self._unsettled |= func is _WAIT
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, func)
        return result

    def _count(self, tensor: Tensor, operator: object) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size, on_host = storage.nbytes(), _on_host.get()

        def release(_: weakref.ref[Any]) -> None:
            del self._live[key]
            if on_host:
                self.host_live_bytes -= size
            else:
                self.live_bytes -= size

        self._live[key] = weakref.ref(storage, release)
        if on_host:
            self.host_live_bytes += size
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_live_bytes)
            return
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes and self._unsettled:
            self._settle()
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_operator = self.live_bytes, str(operator)

    def _settle(self) -> None:
        """Wait until gloo's worker threads have dropped the tensors of collectives that were waited for.

        They do so a moment after the wait, for which they need the interpreter's lock.
        """
        for _ in range(_SETTLE_TRIES):
            time.sleep(_SETTLE_SECONDS)
            if self.live_bytes <= self.peak_bytes:
                return
        self._unsettled = False
