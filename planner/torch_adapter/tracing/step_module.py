"""The training step as one module over flat parameters, which is traced in place of the user's module.

The user's module is never changed: its tensors are replaced only while the traced call runs, by fake
tensors of the same shape, stride and dtype. A tied parameter is one parameter here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from planner.torch_adapter.tracing.loss_arguments import (
    LossFunction,
    SharedArguments,
    closed_over_names,
    refusal_of_loss,
    refusal_of_module,
    share_arguments,
)
from planner.torch_adapter.tracing.provenance import Provenance
from planner.torch_adapter.tracing.trace_error import TraceError, translate


def uncompiled(module: nn.Module) -> nn.Module:
    """Module inside the wrapper that ``torch.compile`` makes; any other as it is."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


@dataclass(frozen=True)
class NamedTensor:
    """A parameter or buffer: its first name, the other names of the same tensor, and the tensor."""

    name: str
    aliases: tuple[str, ...]
    tensor: Tensor


def named_state(pairs: Iterable[tuple[str, Tensor]]) -> tuple[NamedTensor, ...]:
    """Group the names of one tensor, in the order in which the tensors first occur."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in pairs:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return tuple(NamedTensor(found[0], tuple(found[1:]), tensors[key]) for key, found in names.items())


@dataclass(frozen=True)
class StepArguments:
    """The arguments of a step with the tensors taken out, in order and by name."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    leaves: tuple[object, ...]
    treespec: TreeSpec

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StepArguments:
        """Flatten; a positional argument goes by the name of its parameter in ``module.forward``."""
        found, treespec = tree_flatten_with_path((tuple(args), dict(kwargs)))
        positional = _positional_names(module, len(args))
        leaves = tuple(leaf for _, leaf in found)
        named = [(_leaf_name(path, positional), leaf) for path, leaf in found if isinstance(leaf, Tensor)]
        return cls(tuple(name for name, _ in named), tuple(leaf for _, leaf in named), leaves, treespec)

    def rebuild(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``args`` and ``kwargs`` with other tensors in the place of these."""
        replacement = iter(tensors)
        leaves = [next(replacement) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.treespec)
        return args, kwargs


def _positional_names(module: nn.Module, count: int) -> list[str]:
    parameters = list(inspect.signature(module.forward).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    return [*names, *(f"args[{position}]" for position in range(len(names), count))]


def _leaf_name(path: tuple[Any, ...], positional: list[str]) -> str:
    first = positional[path[1].idx] if path[0].idx == 0 else str(path[1].key)
    return first + keystr(path[2:])


class StepModule(nn.Module):
    """Module, loss and non-tensor arguments in one module whose forward returns the scalar loss.

    Its own parameters are named ``p0``, ``p1``, ... and its buffers ``b0``, ...: positions in
    :attr:`parameters_of_module` and :attr:`buffers_of_module`.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: StepArguments,
        loss_fn: LossFunction | None,
        provenance: Provenance,
        fake_mode: FakeTensorMode,
    ) -> None:
        super().__init__()
        self.parameters_of_module = named_state(module.named_parameters(remove_duplicate=False))
        self.buffers_of_module = named_state(module.named_buffers(remove_duplicate=False))
        self._arguments, self._loss_fn, self._provenance = arguments, loss_fn, provenance
        self._module = (module,)  # in a tuple, so that it does not become a submodule
        with fake_mode:
            for position, state in enumerate(self.parameters_of_module):
                parameter = nn.Parameter(_stand_in(state.tensor), requires_grad=state.tensor.requires_grad)
                self.register_parameter(f"p{position}", parameter)
            for position, state in enumerate(self.buffers_of_module):
                self.register_buffer(f"b{position}", _stand_in(state.tensor))
            self.example_tensors = tuple(_stand_in(tensor) for tensor in arguments.tensors)

    def forward(self, *tensors: Tensor) -> tuple[Tensor]:
        """Loss of the step for example tensors in the order of the arguments."""
        (module,) = self._module
        args, kwargs = self._arguments.rebuild(tensors)
        shared = share_arguments(module, self._loss_fn, args, kwargs)
        state, before = {}, {}
        for prefix, group in (("p", self.parameters_of_module), ("b", self.buffers_of_module)):
            for position, named in enumerate(group):
                tensor = getattr(self, f"{prefix}{position}")
                state.update(dict.fromkeys((named.name, *named.aliases), tensor))
                if prefix == "b":
                    before[named.name] = tensor
        self._provenance.restart()
        with self._provenance:
            # The loss function may use the module too (a penalty on its weights): it must find the same tensors there.
            with _reparametrize_module(module, state, tie_weights=False):
                loss = _scalar_loss(_output(module, shared, self._loss_fn), self._loss_fn, shared)
            if _aliases(loss, (*tensors, *state.values())):
                loss = loss * 1  # an output that aliases an input is traced without its gradient
            for name, tensor in before.items():
                if state[name] is not tensor:  # the module assigned a new tensor to its buffer
                    tensor.copy_(state[name].detach())
        return (loss,)


def _aliases(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether a tensor is one of the others or a view of one."""
    base = tensor._base if tensor._is_view() else tensor
    return any(base is (other._base if other._is_view() else other) for other in others)


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def step_loss(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: LossFunction | None) -> Tensor:
    """Scalar loss of a plain forward of ``module``, with the arguments shared out as in the traced step."""
    shared = share_arguments(module, loss_fn, args, kwargs)
    return _scalar_loss(_output(module, shared, loss_fn), loss_fn, shared)


def _output(module: nn.Module, shared: SharedArguments, loss_fn: LossFunction | None) -> Any:
    """Output of a module; where it takes other arguments, the error names them."""
    try:
        return module(*shared.module_args, **shared.module_kwargs)
    except TypeError as error:
        if refusal := refusal_of_module(module, shared, loss_fn):
            raise TraceError(refusal) from error
        raise


def _scalar_loss(output: Any, loss_fn: LossFunction | None, shared: SharedArguments) -> Tensor:
    loss: object
    if loss_fn is not None:
        try:
            loss = loss_fn(output, *shared.loss_args, **shared.loss_kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if isinstance(error, TypeError) and (refusal := refusal_of_loss(loss_fn, shared)):
                raise TraceError(refusal) from error
            raise translate(error, "", "loss_fn", closed_over_names(loss_fn)) from error
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        origin = "loss_fn returned" if loss_fn is not None else "without a loss_fn the module's output must be the loss"
        kind = type(loss if loss_fn is not None else output).__name__
        raise TraceError(f"{origin}, got {kind}: give a loss_fn that maps the module's output to a scalar tensor")
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        shape = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
        of, remedy = "the loss", "reduce it, for example with .mean()"
        if loss_fn is None and not isinstance(output, Mapping):
            of, remedy = "the module's output, which is the loss without a loss_fn,", "give a loss_fn, or reduce it"
        raise TraceError(f"{of} is {shape}, not one floating-point number: {remedy}")
    if not loss.requires_grad:
        raise TraceError("the loss depends on no trainable parameter: set requires_grad on those that are trained")
    return loss.reshape(()) if loss.ndim else loss


@contextmanager
def left_as_found(module: nn.Module) -> Iterator[None]:
    """Restore attributes that the module's forward changes while it is traced (a cache, a counter)."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (mapping, dict(mapping))
        for submodule in module.modules()
        for mapping in (submodule._parameters, submodule._buffers, submodule.__dict__)
    ]
    try:
        yield
    finally:
        for mapping, content in found:
            mapping.clear()
            mapping.update(content)
