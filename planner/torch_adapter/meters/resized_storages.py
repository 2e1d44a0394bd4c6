"""Bytes of live storages under FSDP2 and DTensor, which resize storages and allocate inside operators.

FSDP2 frees a gathered parameter by resizing its storage to zero and fills it again later, without an operator. An
operator on distributed tensors allocates inside, where the plain meter counts nothing.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from planner.torch_adapter.meters.storage_meter import _SETTLE_SECONDS, _SETTLE_TRIES, StorageMeter, _on_host

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_DISTRIBUTED = (DTensor, AsyncCollectiveTensor)
_COLLECTIVES = ("c10d", "_c10d_functional")


class ResizedStorageMeter(StorageMeter):  # type: ignore[no-untyped-call]
    """A storage meter that reads the size of every live storage at every operator, which is slow."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], bool]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let distributed tensors run by their own rules, whose operators on plain tensors come here again."""
        if any(issubclass(kind, _DISTRIBUTED) for kind in types):
            return NotImplemented
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._unsettled |= func.namespace in _COLLECTIVES
        return result

    def _count(self, tensor: Tensor, operator: object) -> None:
        if type(tensor) in _PLAIN:  # a fake tensor, say, has no bytes
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._storages:

                def release(_: object) -> None:
                    del self._storages[key]

                self._storages[key] = weakref.ref(storage, release), _on_host.get()
        self._look()
        if self.live_bytes > self.peak_bytes and self._unsettled:
            self._settle()
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_operator = self.live_bytes, str(operator)
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_live_bytes)

    def _look(self) -> None:
        """Add up the present sizes of the live storages."""
        self.live_bytes = self.host_live_bytes = 0
        for reference, on_host in list(self._storages.values()):
            storage = reference()
            if storage is None:
                continue
            if on_host:
                self.host_live_bytes += storage.nbytes()
            else:
                self.live_bytes += storage.nbytes()

    def _settle(self) -> None:
        for _ in range(_SETTLE_TRIES):
            time.sleep(_SETTLE_SECONDS)
            self._look()
            if self.live_bytes <= self.peak_bytes:
                return
        self._unsettled = False
