"""Memory settings of a layer: checkpointing, hidden states on the host, optimizer state on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils.checkpoint import checkpoint

from planner.layers.plan.document import LayerSettings
from planner.torch_adapter.meters.tensor_kinds import has_data, waited
from runtime.measure.host_copies import HostCopies
from runtime.measure.local_shards import local_tensor
from runtime.measure.optimizer import ShardOptimizer


def keep_as_planned(module: nn.Module, layer: LayerSettings, copies: HostCopies) -> None:
    """Make a module save for its backward only the tensors that its layer's settings keep.

    The module's forward is replaced, not its call: the hooks by which FSDP2 gathers parameters stay outside, so a
    forward that runs again in backward finds them gathered.
    """
    if not (layer.checkpoint or layer.offload_hidden):
        return
    forward: Callable[..., Any] = module.forward
    call = partial(checkpoint, forward, use_reentrant=False) if layer.checkpoint else forward
    offload = HiddenOffload(module, copies) if layer.offload_hidden else None

    def keep(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if offload is None else offload.hooks():
            return call(*args, **kwargs)

    module.forward = keep


@dataclass(frozen=True, slots=True)
class _Distribution:
    """Attributes from which a distributed tensor is rebuilt from its local part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """A saved tensor on the host."""

    host: Tensor
    copied: torch.cuda.Event | None
    distribution: _Distribution | None


class HiddenOffload:
    """Moves tensors that a module saves for backward to the host, parameters excepted.

    Parameters
    ----------
    module
        Module whose parameters are not moved: they are on the device anyway, or are gathered again.
    copies
        Starts the copies.
    """

    def __init__(self, module: nn.Module, copies: HostCopies) -> None:
        self._module = module
        self._copies = copies

    def hooks(self) -> saved_tensors_hooks:
        """Context in which saved tensors are moved."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if not has_data(tensor):
            return tensor
        local = waited(local_tensor(tensor))
        kept = {local_tensor(parameter).untyped_storage().data_ptr() for parameter in self._module.parameters()}
        if local.untyped_storage().data_ptr() in kept or not local.is_floating_point():
            return tensor
        distribution = None
        if isinstance(tensor, DTensor):
            distribution = _Distribution(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        host, copied = self._copies.offload(local)
        self._copies.let_go(local, copied)
        return _Offloaded(host, copied, distribution)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Offloaded):
            unchanged: Tensor = packed
            return unchanged
        self._copies.settle()
        local, fetched = self._copies.prefetch(packed.host, packed.copied)
        self._copies.wait(local, fetched)
        whole = packed.distribution
        if whole is None:
            return local
        return DTensor.from_local(
            local, whole.mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride
        )


class HostState:
    """Keeps the state of some parameters in host memory between their updates.

    Parameters
    ----------
    optimizer
        The optimizer.
    paths
        The parameters.
    copies
        Starts the copies.
    """

    def __init__(self, optimizer: ShardOptimizer, paths: Iterable[str], copies: HostCopies) -> None:
        self._optimizer, self._copies = optimizer, copies
        self._paths = frozenset(paths)
        for path in sorted(self._paths):
            self._to_host(path)

    @contextmanager
    def on_device(self, path: str) -> Iterator[None]:
        """The state of a parameter is on the device inside."""
        if path not in self._paths:
            yield
            return
        kept = self._optimizer.state_of(path)
        self._optimizer.put_state(path, {key: self._copies.prefetch(host, None)[0] for key, host in kept.items()})
        del kept
        yield
        self._to_host(path)

    def _to_host(self, path: str) -> None:
        moved = {}
        for key, tensor in self._optimizer.state_of(path).items():
            moved[key], copied = self._copies.offload(tensor)
            self._copies.wait(tensor, copied)
        self._optimizer.put_state(path, moved)
