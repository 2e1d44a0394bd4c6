"""Checks of single operators: attention by each kernel, and dropout that draws the same numbers everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from planner.graph.attention_kernels import AttentionKernel, AttentionShapes
from planner.graph.operator_graph import TensorSpec
from planner.torch_adapter.local.attention import attention_backward, attention_forward, kernel_of
from planner.torch_adapter.local.attention_kernels import BACKWARD, FORWARD, KernelCall
from planner.torch_adapter.local.calls import OperatorCall, Slot
from planner.torch_adapter.local.context import LocalContext
from planner.torch_adapter.local.operators import build_function
from runtime.gpu_check.outcomes import FailedError, Figures

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest error of an attention beside the CPU's in 32 bits, relative to its largest entry."""


def attention(device: torch.device, sizes: tuple[int, int, int, int]) -> Figures:
    """Error, seconds and workspace of attention and its gradients, by dtype, mask and shared heads.

    Parameters
    ----------
    device
        Where it runs.
    sizes
        Batch, heads, rows and head size.

    Raises
    ------
    FailedError
        An error is above its tolerance.
    """
    found: Figures = {}
    wrong = []
    for dtype in ("float32", "bfloat16", "float16"):
        for name, shared, causal, masked in (
            ("causal", False, True, False),
            ("shared heads", True, True, False),
            ("mask", False, False, True),
        ):
            case = f"{dtype}, {name}"
            found[case] = _attention_case(device, sizes, dtype, shared, causal, masked)
            if not found[case]["error"] <= _TOLERANCE[dtype]:
                wrong.append(case)
    if wrong:
        raise FailedError(f"attention differs from 32 bits on the CPU: {'; '.join(wrong)}", found)
    return found


def _attention_case(
    device: torch.device, sizes: tuple[int, int, int, int], dtype: str, shared: bool, causal: bool, masked: bool
) -> Figures:
    batch, heads, rows, width = sizes
    generator = torch.Generator().manual_seed(0)
    key_heads = heads // 2 if shared else heads
    # Laid out as projections of a model leave them, rows before heads.
    query, gradient = (torch.randn(batch, rows, heads, width, generator=generator).transpose(1, 2) for _ in range(2))
    key, value = (torch.randn(batch, rows, key_heads, width, generator=generator).transpose(1, 2) for _ in range(2))
    mask = [torch.randn(batch, 1, rows, rows, generator=generator)] if masked else []
    given = {"attn_mask": mask[0]} if masked else {}
    exact = _FORWARD(query, key, value, 0.0, causal, **given)
    exact_gradients = _BACKWARD(gradient, query, key, value, *exact, 0.0, causal, **given)
    here = [tensor.to(device, getattr(torch, dtype)) for tensor in (query, key, value, *mask)]
    incoming = gradient.to(here[0])
    forward, kernel = _local(_FORWARD, here, causal, masked, device)
    output, logsumexp = forward(*here)
    backward, _ = _local(_BACKWARD, [incoming, *here[:3], output, logsumexp, *here[3:]], causal, masked, device)
    arguments = (incoming, *here[:3], output, logsumexp, *here[3:])
    results = [output, *backward(*arguments)]
    expected = [exact[0], *exact_gradients]
    pairs = zip((tensor.detach().float().cpu() for tensor in results), expected, strict=True)
    errors = [float((found - wanted).abs().max() / wanted.abs().max()) for found, wanted in pairs]
    shapes = AttentionShapes(dtype, query.shape, key.shape, value.shape, masked, causal)
    figures: Figures = {"kernel": "cpu" if device.type == "cpu" else kernel.value, "error": max(errors)}
    for name, call, operands, back in (
        ("forward", forward, tuple(here), False),
        ("backward", backward, arguments, True),
    ):
        figures[f"{name}_seconds"] = _seconds(partial(call, *operands), device)
        if device.type == "cuda":
            figures[f"{name}_workspace_bytes"] = _workspace(call, operands, device)
            figures[f"{name}_counted_bytes"] = shapes.workspace_item_bytes(back) * query.numel()
    if device.type == "cuda":
        figures["by_kernel"] = dict(_by_kernel(here, incoming, causal, masked, device))
    return figures


def _by_kernel(
    here: list[Tensor], gradient: Tensor, causal: bool, masked: bool, device: torch.device
) -> Iterator[tuple[str, Any]]:
    """Seconds of a forward and of a backward by each kernel that takes the tensors."""
    call, inputs, mask = KernelCall(causal, None), here[:3], here[3] if masked else None
    for kernel in FORWARD:
        try:
            forward = partial(FORWARD[kernel], call, *inputs, mask)
            backward = partial(BACKWARD[kernel], call, gradient, inputs, mask, forward())
            yield kernel.value, [_seconds(forward, device), _seconds(backward, device)]
        except (RuntimeError, AssertionError) as error:
            yield kernel.value, str(error)[:120] or "takes no mask"


def _local(
    target: Any, tensors: list[Tensor], causal: bool, masked: bool, device: torch.device
) -> tuple[Callable[..., Any], AttentionKernel]:
    """The local operator of an attention on one rank, and the kernel that it calls."""
    slots = [Slot(at) for at in range(len(tensors))]
    plain, masks = (slots[:-1], {"attn_mask": slots[-1]}) if masked else (slots, {})
    call = OperatorCall.from_template(target, (*plain, 0.0, causal), masks)
    specs = tuple(
        TensorSpec(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors
    )
    context = LocalContext(call, specs, (), (), (), (1,), (0,), device=device)
    build = attention_backward if target is _BACKWARD else attention_forward
    return build(context) or context.operator(), kernel_of(context)


def dropout(device: torch.device, numel: int) -> Figures:
    """Seconds of a dropout that draws from a counter, and how many of its numbers differ from the CPU's.

    Raises
    ------
    FailedError
        Some differ.
    """
    tensor = torch.ones(numel)
    call = OperatorCall.from_template(aten.native_dropout.default, (Slot(0), 0.1, True), {})
    given, kept = TensorSpec((numel,), (1,), "float32"), TensorSpec((numel,), (1,), "bool")
    results = {}
    for where in (torch.device("cpu"), device):
        context = LocalContext(call, (given,), (given, kept), (("R",),), (("R",), ("R",)), (1,), (0,), device=where)
        function, local = build_function(context), tensor.to(where)
        results[where.type] = (function(local), _seconds(partial(function, local), where))
    found, seconds = results[device.type]
    different = sum(int((a.cpu() != b).sum()) for a, b in zip(found, results["cpu"][0], strict=True))
    figures: Figures = {"elements": numel, "seconds": seconds, "different": different}
    if different:
        raise FailedError(f"{different} of {numel} elements differ from the CPU's", figures)
    return figures


def _seconds(call: Callable[[], object], device: torch.device, runs: int = 5) -> float:
    """Median seconds of a call after a first one, on CUDA by events of the device."""
    call()
    times = []
    for _ in range(runs):
        if device.type == "cuda":
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun.record()
            call()
            ended.record()
            torch.cuda.synchronize(device)
            times.append(begun.elapsed_time(ended) * 1e-3)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return float(median(times))


def _workspace(call: Callable[..., Any], operands: tuple[Tensor, ...], device: torch.device) -> int:
    """Bytes that a call allocates beside its results, by the record of the device's allocator."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = call(*operands)
    torch.cuda.synchronize(device)
    kept = torch.cuda.memory_allocated(device) - before
    del results
    return torch.cuda.max_memory_allocated(device) - before - kept
