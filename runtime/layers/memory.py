"""Memory settings of a layer: checkpointing, hidden states on the host, optimizer state on the host."""

from __future__ import annotations

import weakref
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


def keep_as_planned(module: nn.Module, layer: LayerSettings, hidden: HiddenOffload) -> None:
    """Make a module save for its backward only the tensors that its layer's settings keep.

    The module's forward is replaced, not its call: the hooks by which FSDP2 gathers parameters stay outside, so a
    forward that runs again in backward finds them gathered.

    Parameters
    ----------
    module, layer
        The module and its settings.
    hidden
        Offloads of this rank, the same for all of its layers.
    """
    if not (layer.checkpoint or layer.offload_hidden):
        return
    forward: Callable[..., Any] = module.forward
    call = partial(checkpoint, forward, use_reentrant=False) if layer.checkpoint else forward

    def keep(*args: Any, **kwargs: Any) -> Any:
        with hidden.hooks(module) if layer.offload_hidden else nullcontext():
            return call(*args, **kwargs)

    module.forward = keep


@dataclass(frozen=True, slots=True)
class _Distribution:
    """Attributes from which a distributed tensor is rebuilt from its local part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Offloaded:
    """A saved tensor on the host; backward needs the one that was saved before it next."""

    host: Tensor
    copied: torch.cuda.Event | None
    distribution: _Distribution | None
    before: weakref.ref[_Offloaded] | None


class HiddenOffload:
    """Moves tensors that modules save for backward to the host, parameters excepted, and fetches them in backward.

    Where copies run beside the computation, the next tensor is fetched while backward computes with the last one.

    Parameters
    ----------
    copies
        Starts the copies.
    """

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._last: weakref.ref[_Offloaded] | None = None
        self._ahead: tuple[_Offloaded, Tensor, torch.cuda.Event | None] | None = None
        """The tensor that is fetched before backward asks for it."""

    def hooks(self, module: nn.Module) -> saved_tensors_hooks:
        """Context in which saved tensors are moved.

        Parameters
        ----------
        module
            Its parameters are not moved: they are on the device anyway, or are gathered again.
        """
        return saved_tensors_hooks(partial(self._pack, module), self._unpack)

    def _pack(self, module: nn.Module, tensor: Tensor) -> Any:
        if not has_data(tensor):
            return tensor
        local = waited(local_tensor(tensor))
        kept = {local_tensor(parameter).untyped_storage().data_ptr() for parameter in module.parameters()}
        if local.untyped_storage().data_ptr() in kept or not local.is_floating_point():
            return tensor
        distribution = None
        if isinstance(tensor, DTensor):
            distribution = _Distribution(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        host, copied = self._copies.offload(local)
        self._copies.let_go(local, copied)
        packed = _Offloaded(host, copied, distribution, self._last)
        self._last = weakref.ref(packed)
        return packed

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Offloaded):
            unchanged: Tensor = packed
            return unchanged
        self._copies.settle()
        local = self._fetched(packed)
        before = None if packed.before is None else packed.before()
        if self._copies.overlaps and before is not None:
            self._ahead = (before, *self._copies.prefetch(before.host, before.copied))
        whole = packed.distribution
        if whole is None:
            return local
        return DTensor.from_local(
            local, whole.mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride
        )

    def _fetched(self, packed: _Offloaded) -> Tensor:
        """The local tensor, for which the computation waits."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:  # backward may want another one: this one is freed when its copy is done
            self._copies.wait(*ahead[1:])
            if ahead[0] is packed:
                return ahead[1]
        local, fetched = self._copies.prefetch(packed.host, packed.copied)
        self._copies.wait(local, fetched)
        return local


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
