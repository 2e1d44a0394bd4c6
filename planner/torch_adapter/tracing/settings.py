"""Global settings of torch while a step is traced, restored afterwards."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointFunction

from planner.torch_adapter.tracing.provenance import Provenance
from planner.torch_adapter.tracing.trace_error import TraceError

_WITHOUT_AUTOCAST = (
    "leave it out and give the model its dtype (--dtype bfloat16 for hf: models), or cast in forward with .to(dtype)"
)


@contextmanager
def tracing_settings() -> Iterator[None]:
    """Settings of torch under which a step is traced the same way on every machine."""
    log = logging.getLogger(FakeTensorMode.__module__)
    level = log.level
    try:
        log.setLevel(logging.CRITICAL)  # it prints tracebacks of errors that are raised anyway
        with (
            # Libraries leave out checks that read tensors while they are being compiled.
            patch.object(torch.compiler, "_is_compiling_flag", True),
            # The CPU's fused recurrent kernels have no counterpart elsewhere.
            _without_onednn(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device("cpu"),
        ):
            yield
    finally:
        log.setLevel(level)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the advice of transformers back, which is about weights and tokens that a plan has none of.

    A verbosity that its user chose stays, in the environment (``TRANSFORMERS_VERBOSITY``) or by its functions.
    """
    messages = sys.modules.get("transformers.utils.logging")
    chosen = "TRANSFORMERS_VERBOSITY" in os.environ
    if messages is None or chosen or messages.get_verbosity() != messages.WARNING:
        yield
        return
    messages.set_verbosity_error()
    try:
        yield
    finally:
        messages.set_verbosity_warning()


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Switch off that library alone; ``torch.backends.mkldnn.flags`` sets more and warns about it."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def no_custom_functions(provenance: Provenance) -> Iterator[None]:
    """Refuse ``torch.autograd.Function``: its backward may be any code, so no rule can be verified for it.

    The functions that torch generates for a ``torch.library.custom_op`` pass: those are operators. Of
    ``torch.utils.checkpoint`` only the function inside is traced: plans decide what is recomputed.
    """
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def guarded(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch._library."):
            return apply(cls, *args, **kwargs)
        if cls is CheckpointFunction:
            function, _, *inputs = args
            if any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
                return function(*inputs)
            raise TraceError(
                f"{provenance.place()}: torch.utils.checkpoint with use_reentrant=True gives no gradients here, since "
                "none of its inputs requires one; use use_reentrant=False"
            )
        raise TraceError(
            f"{provenance.place()}: custom autograd.Function {cls.__module__}.{cls.__qualname__}; write it with "
            "differentiable torch operators, or as a torch.library.custom_op with register_autograd"
        )

    with patch.object(torch.autograd.Function, "apply", classmethod(guarded)):
        yield


@contextmanager
def watched_autocast(provenance: Provenance) -> Iterator[list[str]]:
    """Refuse ``torch.autocast`` where the trace would not show it, and note where it does.

    The step is traced on CPU tensors. Autocast of CPUs leaves casts in the graph; that of any other device leaves
    nothing, so the step would be planned in a dtype that it does not have. An instance made before the trace tells no
    longer whether it was meant to be enabled where its device is absent, and is refused as well.

    Yields
    ------
    list of str
        Notes, complete when the trace is.
    """
    if active := [device for device in ("cpu", "cuda", "xpu") if torch.is_autocast_enabled(device)]:
        raise TraceError(
            f"torch.autocast({active[0]!r}) is on around the planner, and a plan would not hold it: {_WITHOUT_AUTOCAST}"
        )
    notes: list[str] = []
    known: set[int] = set()
    make: Callable[..., None] = torch.autocast.__init__
    enter: Callable[..., Any] = torch.autocast.__enter__

    def refuse(device: str) -> None:
        if device != "cpu":
            raise TraceError(
                f"{provenance.place()}: torch.autocast({device!r}) leaves no casts in a trace on CPU tensors, so the "
                f"plan would have another dtype: {_WITHOUT_AUTOCAST}"
            )

    def making(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **more: Any) -> None:
        if enabled:
            refuse(device_type)
        make(self, device_type, dtype, enabled, *rest, **more)
        known.add(id(self))

    def entering(self: Any) -> Any:
        if self._enabled or id(self) not in known:
            refuse(self.device)
        if self._enabled:
            notes.append(
                f"{provenance.place()}: torch.autocast casts to {str(self.fast_dtype).removeprefix('torch.')} by the "
                "rules of CPUs, on every device that the plan runs on"
            )
        return enter(self)

    with patch.object(torch.autocast, "__init__", making), patch.object(torch.autocast, "__enter__", entering):
        yield notes
