"""Global settings of torch while a step is traced, restored afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.torch_adapter.tracing.provenance import Provenance
from planner.torch_adapter.tracing.trace_error import TraceError


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

    The functions that torch generates for a ``torch.library.custom_op`` pass: those are operators.
    """
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def guarded(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch._library."):
            return apply(cls, *args, **kwargs)
        raise TraceError(
            f"{provenance.place()}: custom autograd.Function {cls.__module__}.{cls.__qualname__}; write it with "
            "differentiable torch operators, or as a torch.library.custom_op with register_autograd"
        )

    with patch.object(torch.autograd.Function, "apply", classmethod(guarded)):
        yield
