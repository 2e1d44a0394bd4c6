"""Compilation by ``torch.compile``'s own backends with another cut of the joint graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._guards import CompileContext
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.fx import Graph, GraphModule, Interpreter

MOST_BETWEEN = 8
"""Kernels that may stand between one and another that reads its result, where they are fused."""


class Partitioner(Protocol):
    """Cuts a joint graph into forward and backward."""

    def __call__(
        self, joint: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[GraphModule, GraphModule]:
        """Cut it; ``options`` are torch's own."""


def compile_inductor(partitioner: Partitioner) -> Callable[..., Any]:
    """``inductor`` with this partitioner."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.virtualized import V

    class NearFusion(InductorChoices):
        """Fuses kernels only where few others stand between them: else what they read or make is held longer."""

        @staticmethod
        def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            return _between(node1, node2) <= MOST_BETWEEN and InductorChoices.can_fuse_vertical(
                scheduler, node1, node2, shared_data_score
            )

        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            return _between(node1, node2) == 0 and InductorChoices.can_fuse_horizontal(
                scheduler, node1, node2, shared_data_score
            )

    patches = {
        "custom_partitioner_fn": _Custom(partitioner),
        "fx_graph_cache": False,  # a cached graph has no plan to show; the caches of compiled kernels stay on
        "post_grad_custom_post_pass": _EarlyProducts(),
        "allow_buffer_reuse": False,  # a buffer that waits to be reused takes memory; the allocator reuses it as well
        "layout_optimization": False,  # copies of convolutions' weights and inputs would be held until the backward
        "reorder_for_peak_memory": False,  # kernels run in the order whose peak was predicted
    }

    def inner(*args: Any, **kwargs: Any) -> Any:
        with V.set_choices_handler(NearFusion()):  # here, because the backward may be compiled later
            return compile_fx_inner(*args, **kwargs)

    def compiled(module: GraphModule, inputs: list[torch.Tensor]) -> Any:
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(module, inputs, inner_compile=inner, config_patches=patches)

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


def _between(node1: Any, node2: Any) -> int:
    """Kernels between two, in the order before fusion."""
    distance: int = max(node1.min_order - node2.max_order, node2.min_order - node1.max_order, 1) - 1
    return distance


class _EarlyProducts(CustomGraphPass):
    """Computes products where their factors are, not where their sum with another tensor is.

    Inductor makes one operator of a product and an addition. Where the other tensor comes late, as the gradient of an
    embedding that is the head as well, the factors of the product, gradients of logits, would be held until then.
    """

    def __call__(self, graph: Graph) -> None:
        position = {node: k for k, node in enumerate(graph.nodes)}
        for node in list(graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)):
            added, left, right = node.args
            if node.kwargs or added.op == "placeholder" or added.meta["val"].shape != node.meta["val"].shape:
                continue
            with graph.inserting_after(max(left, right, key=position.__getitem__)):
                product = graph.call_function(torch.ops.aten.mm.default, (left, right))
            with graph.inserting_before(node):
                total = graph.call_function(torch.ops.aten.add.Tensor, (added, product))
            product.meta, total.meta = node.meta.copy(), node.meta.copy()
            node.replace_all_uses_with(total)
            graph.erase_node(node)

    def uuid(self) -> Any | None:
        return "meshwright-early-products"


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
