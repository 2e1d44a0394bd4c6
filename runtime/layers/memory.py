"""Memory settings of a layer: checkpointing, hidden states on the host, optimizer state on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
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
class _Forward:
    """One forward of a module: what it saved, and the order in which backward asks for it.

    Only what it saved keeps it, so that host memory is freed with the graph.
    """

    module: nn.Module
    before: weakref.ref[_Forward] | None
    saved: list[weakref.ref[_Offloaded]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Offloaded:
    """A saved tensor on the host, with its place among those of its forward."""

    host: Tensor
    copied: torch.cuda.Event | None
    distribution: _Distribution | None
    forward: _Forward
    place: int


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A tensor that is fetched before backward asks for it, and what is copied."""

    packed: weakref.ref[_Offloaded]
    host: Tensor
    local: Tensor
    fetched: torch.cuda.Event | None


class HiddenOffload:
    """Moves tensors that modules save for backward to the host, parameters excepted, and fetches them in backward.

    Where copies run beside the computation, the next tensor is fetched while backward computes with the last one. The
    first backward of a module shows the order: nodes run in reverse, but one node asks for its tensors as it saved
    them.

    Parameters
    ----------
    copies
        Starts the copies.
    """

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._last: weakref.ref[_Forward] | None = None
        self._current: _Forward | None = None
        """The forward whose tensors backward asked for last."""
        self._orders: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()
        self._ahead: _Ahead | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """One forward and backward of all micro-batches.

        However it ends, the computation then waits for all copies, so that the allocator does not give their memory
        away while they go on.
        """
        try:
            yield
        except BaseException:
            self._current = None  # its backward did not show the whole order
            raise
        finally:
            if self._last is not None:  # else nothing was ever moved
                self._copies.join()
            self._ahead = None

    def hooks(self, module: nn.Module) -> saved_tensors_hooks:
        """Context of one forward in which saved tensors are moved.

        Parameters
        ----------
        module
            Its parameters are not moved: they are on the device anyway, or are gathered again.
        """
        forward = _Forward(module, self._last)
        self._last = weakref.ref(forward)
        return saved_tensors_hooks(partial(self._pack, forward), self._unpack)

    def _pack(self, forward: _Forward, tensor: Tensor) -> Any:
        if not has_data(tensor):
            return tensor
        local = waited(local_tensor(tensor))
        kept = {local_tensor(parameter).untyped_storage().data_ptr() for parameter in forward.module.parameters()}
        if local.untyped_storage().data_ptr() in kept or not local.is_floating_point():
            return tensor
        distribution = None
        if isinstance(tensor, DTensor):
            distribution = _Distribution(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        host, copied = self._copies.offload(local)
        self._copies.let_go(local, copied)
        packed = _Offloaded(host, copied, distribution, forward, len(forward.saved))
        forward.saved.append(weakref.ref(packed))
        return packed

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Offloaded):
            unchanged: Tensor = packed
            return unchanged
        self._copies.settle()
        local = self._fetch(packed)
        self._learn(packed)
        if self._copies.overlaps and self._ahead is None:
            following = self._following(packed)
            if following is not None:
                fetched = self._copies.prefetch(following.host, following.copied)
                self._ahead = _Ahead(weakref.ref(following), following.host, *fetched)
        whole = packed.distribution
        if whole is None:
            return local
        return DTensor.from_local(
            local, whole.mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride
        )

    def _fetch(self, packed: _Offloaded) -> Tensor:
        """The local tensor, for which the computation waits."""
        ahead = self._ahead
        if ahead is not None and ahead.packed() in (packed, None):  # None: backward did without it
            self._ahead = None
            self._copies.wait(ahead.local, ahead.fetched)
            if ahead.packed() is packed:
                return ahead.local
        local, fetched = self._copies.prefetch(packed.host, packed.copied)
        self._copies.wait(local, fetched)
        return local

    def _learn(self, packed: _Offloaded) -> None:
        """Keep the order of a module's first backward once that has come to another forward."""
        if self._current is not packed.forward:
            if self._current is not None:
                self._orders.setdefault(self._current.module, self._current.asked)
            self._current = packed.forward
        packed.forward.asked.append(packed.place)

    def _following(self, packed: _Offloaded) -> _Offloaded | None:
        """What backward asks for next, as far as is known."""
        forward: _Forward | None = packed.forward
        order = self._orders.get(packed.forward.module, [])
        following = order[order.index(packed.place) + 1 :] if packed.place in order else []
        if order and not following:  # the forward before
            forward = None if packed.forward.before is None else packed.forward.before()
            following = [] if forward is None else self._orders.get(forward.module, [])
        if forward is None or not following or following[0] >= len(forward.saved):
            return None
        return forward.saved[following[0]]()


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
