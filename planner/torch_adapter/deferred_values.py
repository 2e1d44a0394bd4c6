"""Initial values of a module's parameters without the parameters: recorded while it is built, made one at a time.

Parameters that are registered inside :func:`deferred_parameters` go to ``meta``. What is written to them is recorded
with the state of the random numbers before it. Random numbers are drawn all the same, into memory that is dropped at
once, so that those of every later parameter are the ones of a module that was built whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_OVERWRITE = frozenset(("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_"))
"""Operators whose result does not depend on what their first argument was."""

_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _View:
    """Part of a storage, whose value was that of some history; ``history`` is None for the storage that is written."""

    history: _History | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator with its arguments, tensors of deferred storages as views, and the random state before it."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: Tensor | None


@dataclass(frozen=True, slots=True)
class _History:
    """How a storage came by its value: where it began, and what was written to it in turn."""

    begin: Tensor | _Call | None
    dtype: torch.dtype
    numel: int
    writes: tuple[_Call, ...] = ()


@dataclass(slots=True)
class _Cell:
    """A storage on ``meta``, kept so that no other has its identity."""

    storage: torch.UntypedStorage
    history: _History


@dataclass(slots=True)
class DeferredValues:
    """Values of parameters that are on ``meta``."""

    _cells: dict[int, _Cell] = field(default_factory=dict)

    def __contains__(self, tensor: Tensor) -> bool:
        return _is_on_meta(tensor) and _identity(tensor) in self._cells

    def value(self, tensor: Tensor) -> Tensor:
        """Make the value of a parameter, or of a view of it; the caller's random state is left as it was.

        Raises
        ------
        KeyError
            It was not made inside :func:`deferred_parameters`.
        """
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return _as_view(_evaluated(self._cells[_identity(tensor)].history), self._view(tensor, written=True))

    def forget(self, tensor: Tensor) -> None:
        """Drop what is known of a parameter."""
        self._cells.pop(_identity(tensor), None)

    def begin(self, tensor: Tensor, begin: Tensor | _Call | None) -> None:
        """Take in a storage on ``meta`` whose value begins as a tensor or as the result of a call."""
        storage = tensor.untyped_storage()
        history = _History(begin, tensor.dtype, storage.nbytes() // tensor.element_size())
        self._cells[_identity(tensor)] = _Cell(storage, history)

    def write(self, tensor: Tensor, call: _Call, overwrites: bool) -> None:
        """Record a write to a storage, or to a part of it, which may not depend on what it was."""
        cell = self._cells[_identity(tensor)]
        history = cell.history
        whole = tensor.numel() == history.numel and tensor.dtype == history.dtype
        others = tree_leaves((call.args[1:], call.kwargs))
        reads = any(isinstance(each, _View) and each.history is None for each in others)
        if overwrites and whole and not reads:
            cell.history = _History(None, history.dtype, history.numel, (call,))
        else:
            cell.history = _History(history.begin, history.dtype, history.numel, (*history.writes, call))

    def call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Tensor | None, is_random: bool
    ) -> _Call:
        """Record a call, and draw the numbers that it would draw."""
        state = None
        if is_random:
            state = (kwargs.get("generator") or torch.default_generator).get_state()
            _draw(function, args, kwargs)
        given, named = self._packed((args, kwargs), written)
        return _Call(function, given, named, state)

    def _packed(self, tree: Any, written: Tensor | None) -> Any:
        """Arguments in which deferred tensors are views of what they are now; `written` is of the storage itself."""
        own = None if written is None else _identity(written)

        def pack(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf not in self:
                return leaf
            return self._view(leaf, _identity(leaf) == own)

        return tree_map(pack, tree)

    def _view(self, tensor: Tensor, written: bool) -> _View:
        history = None if written else self._cells[_identity(tensor)].history
        return _View(history, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class
    """Records what is done to deferred tensors; everything else happens."""

    def __init__(self, values: DeferredValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        held = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf in self._values]
        if not held and torch.device("meta") != kwargs.get("device"):
            return func(*args, **kwargs)
        written = args[0] if func._schema.is_mutable and held and args[0] is held[0] else None
        if func._schema.is_mutable and written is None:
            raise RuntimeError(f"{func} writes a parameter that has no values yet into another tensor")
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        call = self._values.call(func, tuple(args), dict(kwargs), written, is_random)
        result = func(*args, **kwargs)
        if written is not None:
            self._values.write(written, call, func.overloadpacket.__name__ in _OVERWRITE)
            return result
        for position, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor) and _is_on_meta(leaf) and leaf not in self._values:
                chosen = _Pick(func, position) if isinstance(result, (tuple, list)) else func
                self._values.begin(leaf, _Call(chosen, call.args, call.kwargs, call.random_state))
        return result


class _SeemsReal(TorchFunctionMode):
    """Says of deferred tensors that they are not on ``meta``, where torch's initialisers would do nothing."""

    def __init__(self, values: DeferredValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META and args[0] in self._values:
            return False
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Pick:
    """One result of an operator that has several."""

    operator: Any
    position: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tree_leaves(self.operator(*args, **kwargs))[self.position]


@contextmanager
def parameters_on_meta(taken: Callable[[nn.Parameter, Tensor], None] = lambda made, real: None) -> Iterator[None]:
    """Give parameters of modules that are built inside no memory, and their buffers real values.

    Each parameter exists for a moment; its initialisation does nothing.

    Parameters
    ----------
    taken
        Called with every parameter on ``meta`` and the one that it replaces.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or _is_on_meta(parameter):
            return parameter
        made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        taken(made, parameter.detach())
        return made

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def deferred_parameters() -> Iterator[DeferredValues]:
    """Give parameters of modules that are built inside no memory, and remember their values; buffers are real.

    Nothing that is built may read a parameter's value.
    """
    values = DeferredValues()

    truncated = nn.init._no_grad_trunc_normal_

    def truncated_later(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """One call: it looks at its numbers and draws again what is out of bounds."""
        if tensor not in values:
            return truncated(tensor, *args, **kwargs)
        values.write(tensor, values.call(truncated, (tensor, *args), kwargs, tensor, is_random=True), overwrites=True)
        return tensor

    nn.init._no_grad_trunc_normal_ = truncated_later
    try:
        with parameters_on_meta(values.begin), _Recorder(values), _SeemsReal(values):
            yield values
    finally:
        nn.init._no_grad_trunc_normal_ = truncated


def _is_on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _draw(func: Any, args: Any, kwargs: Any) -> None:
    """Draw the numbers that an operator on ``meta`` does not draw."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and _is_on_meta(leaf):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
        return _on_cpu(leaf)

    func(*tree_map(real, args), **tree_map(real, kwargs))


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if leaf == torch.device("meta") else leaf


def _evaluated(history: _History) -> Tensor:
    """Flat values of a storage."""
    begin = history.begin
    if isinstance(begin, _Call):
        flat = _flat(_run(begin, None))
    elif begin is None:
        flat = torch.empty(history.numel, dtype=history.dtype)
    else:
        flat = _flat(begin).clone()
    for call in history.writes:
        _run(call, flat)
    return flat


def _run(call: _Call, own: Tensor | None) -> Any:
    def real(leaf: Any) -> Any:
        if not isinstance(leaf, _View):
            return leaf if isinstance(leaf, Tensor) else _on_cpu(leaf)
        flat = own if leaf.history is None else _evaluated(leaf.history)
        assert flat is not None
        return _as_view(flat, leaf)

    args, kwargs = tree_map(real, call.args), tree_map(real, call.kwargs)
    if call.random_state is not None:
        if kwargs.get("generator") is None:
            torch.set_rng_state(call.random_state)
        else:
            kwargs["generator"] = torch.Generator()
            kwargs["generator"].set_state(call.random_state)
    return call.operator(*args, **kwargs)


def _flat(tensor: Tensor) -> Tensor:
    """Elements of a dense tensor as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _as_view(flat: Tensor, view: _View) -> Tensor:
    return flat.as_strided(view.size, view.stride, view.offset)
