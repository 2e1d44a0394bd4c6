"""Compilation by ``torch.compile``'s own backends with another cut of the joint graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._guards import CompileContext
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule, Interpreter


class Partitioner(Protocol):
    """Cuts a joint graph into forward and backward."""

    def __call__(
        self, joint: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[GraphModule, GraphModule]:
        """Cut it; ``options`` are torch's own."""


def compile_inductor(partitioner: Partitioner) -> Callable[..., Any]:
    """``inductor`` with this partitioner."""
    from torch._inductor.compile_fx import compile_fx

    patches = {
        "custom_partitioner_fn": _Custom(partitioner),
        "fx_graph_cache": False,  # a cached graph has no plan to show; the caches of compiled kernels stay on
        "allow_buffer_reuse": False,  # a buffer that waits to be reused takes memory; the allocator reuses it as well
    }

    def compiled(module: GraphModule, inputs: list[torch.Tensor]) -> Any:
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(module, inputs, config_patches=patches)

    return compiled


def compile_eager(partitioner: Partitioner) -> Callable[..., Any]:
    """Torch's kernels one by one, cut by this partitioner."""

    def cut(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
        return partitioner(joint, inputs, options)

    def run(module: GraphModule, _: list[torch.Tensor]) -> Any:
        def call(arguments: list[Any]) -> Any:
            return Interpreter(module).boxed_run(arguments)  # frees what is read

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    backend: Callable[..., Any] = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=cut)
    return backend


def cause_of(error: RuntimeError) -> BaseException:
    """The error of a backend that ``torch.compile`` wrapped; any other as it is."""
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error


def frame_number() -> int:
    """Number of the Python frame that is being compiled; a frame that is compiled again keeps its number."""
    compile_id = CompileContext.current_compile_id()
    return -1 if compile_id is None or compile_id.frame_id is None else compile_id.frame_id


class _Custom(CustomPartitionerFn):
    """Inductor's interface of a partitioner."""

    def __init__(self, partitioner: Partitioner) -> None:
        self._partitioner = partitioner

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        return self._partitioner(gm, joint_inputs, {k: v for k, v in kwargs.items() if k != "compiler"})

    def uuid(self) -> Any | None:
        return None
