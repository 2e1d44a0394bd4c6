"""Attention on CUDA without a device: which kernel is called, and whether it gets what it takes.

Doubles of the kernels run on the CPU. They refuse what the kernels of a device refuse or read wrongly, and compute with
the CPU's. Torch's own shape functions of the kernels run on fake tensors of a device.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.graph.attention_kernels import AttentionKernel, AttentionShapes
from planner.graph.operator_graph import TensorSpec
from planner.torch_adapter.local import attention
from planner.torch_adapter.local.attention import attention_backward, attention_forward, blockwise_backward
from planner.torch_adapter.local.attention_kernels import BACKWARD, FORWARD, KernelCall
from planner.torch_adapter.local.calls import OperatorCall, Slot
from planner.torch_adapter.local.context import LocalContext

aten = torch.ops.aten
CPU_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH, EFFICIENT, CUDNN, BLOCKS = AttentionKernel
CUDA = torch.device("cuda", 0)
MASKS = {FLASH: (False,), EFFICIENT: (False, True), CUDNN: (False, True)}
CASES = [
    (kernel, causal, masked, heads, rows)
    for kernel, masks in MASKS.items()
    for causal, masked, heads, rows in itertools.product((False, True), masks, (4, 2), (48, 50))
    if not (causal and masked) and not (kernel is CUDNN and masked and heads == 2)
]


@pytest.mark.parametrize(
    ("shapes", "capability", "kernel"),
    [
        (AttentionShapes("bfloat16", (2, 8, 64, 64), (2, 2, 64, 64), (2, 2, 64, 64), causal=True), (8, 0), FLASH),
        (AttentionShapes("bfloat16", (2, 8, 64, 64), (2, 2, 64, 64), (2, 2, 64, 64), causal=True), (9, 0), CUDNN),
        (AttentionShapes("bfloat16", (2, 8, 64, 192), (2, 8, 64, 192), (2, 8, 64, 192)), (9, 0), FLASH),
        (AttentionShapes("float16", (2, 8, 64, 64), (2, 8, 64, 64), (2, 8, 64, 64)), (7, 5), EFFICIENT),
        (AttentionShapes("bfloat16", (2, 8, 64, 64), (2, 8, 64, 64), (2, 8, 64, 64)), (7, 5), BLOCKS),
        (AttentionShapes("bfloat16", (2, 8, 64, 64), (2, 8, 64, 64), (2, 8, 64, 64), masked=True), (8, 0), EFFICIENT),
        (AttentionShapes("bfloat16", (2, 8, 64, 64), (2, 8, 64, 64), (2, 8, 64, 64), masked=True), (9, 0), CUDNN),
        (AttentionShapes("bfloat16", (2, 8, 8, 64), (2, 8, 64, 64), (2, 8, 64, 64), causal=True), (9, 0), EFFICIENT),
        (AttentionShapes("bfloat16", (2, 8, 64, 256), (2, 8, 64, 256), (2, 8, 64, 256)), (9, 0), EFFICIENT),
        (AttentionShapes("float32", (2, 8, 64, 64), (2, 8, 64, 64), (2, 8, 64, 64)), (9, 0), EFFICIENT),
        (AttentionShapes("float32", (2, 8, 64, 6), (2, 8, 64, 6), (2, 8, 64, 6)), (9, 0), BLOCKS),
        (AttentionShapes("float64", (2, 8, 64, 64), (2, 8, 64, 64), (2, 8, 64, 64)), (9, 0), BLOCKS),
    ],
)
def test_a_kernel_is_chosen_as_torch_chooses(shapes, capability, kernel):
    assert shapes.kernel(capability) is kernel


@pytest.mark.parametrize(
    ("dtype", "key_heads", "masked", "forward", "backward"),
    [
        ("float32", 8, False, 0, 4),
        ("bfloat16", 8, False, 0, 4),
        ("bfloat16", 8, True, 0, 4),
        # Gradients of keys and values per head of queries; the memory-efficient kernel copies keys and values too.
        ("bfloat16", 2, False, 0, 8),
        ("float32", 2, False, 8, 16),
    ],
)
def test_workspaces_are_per_element_of_the_queries(dtype, key_heads, masked, forward, backward):
    keys = (2, key_heads, 64, 64)
    shapes = AttentionShapes(dtype, (2, 8, 64, 64), keys, keys, masked)
    assert (shapes.workspace_item_bytes(False), shapes.workspace_item_bytes(True)) == (forward, backward)


def inputs_of(kernel, masked, heads, rows, device="cpu"):
    """Queries cut out of one tensor with keys and values, as models do; and a mask that is the same for all heads."""
    dtype = torch.float32 if kernel is EFFICIENT else torch.bfloat16
    query = torch.randn(2, rows, 3 * 256, dtype=dtype, device=device).narrow(2, 0, 256)
    query = query.unflatten(-1, (4, 64)).transpose(1, 2)
    key, value = (torch.randn(2, heads, rows, 64, dtype=dtype, device=device) for _ in range(2))
    return query, key, value, torch.randn(2, 1, rows, rows, dtype=dtype, device=device) if masked else None


@pytest.mark.parametrize(("kernel", "causal", "masked", "heads", "rows"), CASES)
def test_torchs_shape_functions_take_what_the_kernels_get(kernel, causal, masked, heads, rows):
    with FakeTensorMode():
        query, key, value, mask = inputs_of(kernel, masked, heads, rows, "cuda")
        call = KernelCall(causal, None)
        output, logsumexp = FORWARD[kernel](call, query, key, value, mask)
        assert (output.shape, logsumexp.shape, logsumexp.dtype) == (query.shape, (2, 4, rows), torch.float32)
        gradients = BACKWARD[kernel](call, torch.empty_like(output), (query, key, value), mask, (output, logsumexp))
        assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


def checked(half, *tensors):
    """Refuse what a kernel of a device cannot read."""
    for tensor in tensors:
        if tensor is not None:
            assert tensor.stride(-1) == 1, "rows of a head lie apart"
            assert all(step % 8 == 0 for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
                       and step != 1), "not aligned"  # fmt: skip
            assert tensor.storage_offset() % 8 == 0, "not aligned"
            assert not half or tensor.dtype in (torch.bfloat16, torch.float16), "not of 16 bits"


def flash(query, key, value, dropout=0.0, causal=False, debug=False, scale=None):
    checked(True, query, key, value)
    assert not causal or query.shape[2] == key.shape[2], "its diagonal ends at the last key"
    return (*CPU_FORWARD(query, key, value, dropout, causal, scale=scale), None, None, 0, 0, query, query, query)


def flash_backward(gradient, query, key, value, output, logsumexp, cq, ck, rows, keys, dropout, causal, *_, scale=None):
    checked(True, gradient, query, key, value, output)
    assert (cq, ck, rows, keys) == (None, None, query.shape[2], key.shape[2])
    return CPU_BACKWARD(gradient, query, key, value, output, logsumexp, dropout, causal, scale=scale)


def efficient(query, key, value, bias, saves, dropout=0.0, causal=False, scale=None):
    checked(False, query, key, value, bias)
    assert saves
    assert query.shape[1] == key.shape[1], "no head is shared"
    assert bias is None or bias.shape == (*query.shape[:3], key.shape[2]), "a mask for every row of every head"
    output, logsumexp = CPU_FORWARD(query, key, value, dropout, causal, attn_mask=bias, scale=scale)
    return output, torch.nn.functional.pad(logsumexp, (0, -query.shape[2] % 32), value=torch.nan), query, query


def efficient_backward(
    gradient, query, key, value, bias, output, logsumexp, seed, offset, dropout, mask, causal=False, scale=None
):
    checked(False, gradient, query, key, value, bias, output)
    assert mask == [True, True, True, False]
    assert logsumexp.shape[2] % 32 == 0, "rows up to a multiple of 32"
    saved = logsumexp[:, :, : query.shape[2]].contiguous()
    found = CPU_BACKWARD(gradient, query, key, value, output, saved, dropout, causal, attn_mask=bias, scale=scale)
    return (*found, None)


def cudnn(query, key, value, bias, saves, dropout=0.0, causal=False, debug=False, scale=None):
    checked(True, query, key, value, bias)
    output, logsumexp = CPU_FORWARD(query, key, value, dropout, causal, attn_mask=bias, scale=scale)
    return (output, logsumexp.unsqueeze(-1), None, None, 0, 0, query, query, None)


def cudnn_backward(gradient, query, key, value, output, logsumexp, seed, offset, bias, *rest, scale=None):
    checked(True, gradient, query, key, value, bias, output)
    assert logsumexp.ndim == 4
    return CPU_BACKWARD(
        gradient, query, key, value, output, logsumexp.squeeze(-1), *rest[4:], attn_mask=bias, scale=scale
    )


@pytest.fixture
def doubles():
    """Kernels of CUDA on the CPU, as long as the test runs."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, double in (
            ("flash_attention", flash),
            ("flash_attention_backward", flash_backward),
            ("efficient_attention", efficient),
            ("efficient_attention_backward", efficient_backward),
            ("cudnn_attention", cudnn),
            ("cudnn_attention_backward", cudnn_backward),
        ):
            library.impl(f"_scaled_dot_product_{name}", double, "CPU")
        yield


@pytest.mark.parametrize(("kernel", "causal", "masked", "heads", "rows"), CASES)
def test_a_kernel_computes_the_traced_attention(kernel, causal, masked, heads, rows, doubles, monkeypatch):
    """The local operator on CUDA, with the double of the kernel that is chosen there, beside the traced one."""
    query, key, value, mask = inputs_of(kernel, masked, heads, rows)
    monkeypatch.setattr(attention, "capability_of", lambda device: (8, 0) if kernel is FLASH else (9, 0))
    given = {"attn_mask": mask} if masked else {}
    output, logsumexp = CPU_FORWARD(query, key, value, 0.0, causal, **given)
    gradient = torch.randn_like(output)
    gradients = CPU_BACKWARD(gradient, query, key, value, output, logsumexp, 0.0, causal, **given)
    for target, build, tensors, expected in (
        (CPU_FORWARD, attention_forward, (query, key, value), (output, logsumexp)),
        (CPU_BACKWARD, attention_backward, (gradient, query, key, value, output, logsumexp), gradients),
    ):
        slots = [Slot(at) for at in range(len(tensors) + masked)]
        masks = {"attn_mask": slots[-1]} if masked else {}
        call = OperatorCall.from_template(target, (*slots[: len(tensors)], 0.0, causal), masks)
        given = (*tensors, mask) if masked else tensors
        specs = tuple(TensorSpec(tuple(t.shape), t.stride(), str(t.dtype).removeprefix("torch.")) for t in given)
        context = LocalContext(call, specs, (), (), (), (1,), (0,), device=CUDA)
        assert attention.kernel_of(context) is kernel
        for found, wanted in zip(build(context)(*given), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-2 if kernel is not EFFICIENT else 1e-4)


def test_shapes_that_no_kernel_takes_run_in_blocks(monkeypatch):
    monkeypatch.setattr(attention, "capability_of", lambda device: (9, 0))
    call = OperatorCall.from_template(CPU_BACKWARD, (*(Slot(at) for at in range(6)), 0.0, False), {})
    specs = (TensorSpec((2, 4, 8, 6), (192, 48, 6, 1), "float32"),) * 6
    context = LocalContext(call, specs, (), (), (), (1,), (0,), device=CUDA)
    assert attention_backward(context).__qualname__ == blockwise_backward(context).__qualname__
