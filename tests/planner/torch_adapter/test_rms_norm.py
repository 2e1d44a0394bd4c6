"""RMS normalization as one operator: torch's numbers and gradients, one operator of a trace, its kernels on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from planner.strategies.traced_step import trace_step
from planner.torch_adapter.local import rms_norm as module
from planner.torch_adapter.local.rms_norm import rms_norm, rms_norm_as_one_operator, rms_norm_backward

aten = torch.ops.aten


def tensors(dtype, shape=(3, 5, 8), weight=1, transposed=False):
    found = torch.randn(*shape, dtype=dtype)
    found = found.transpose(0, 1).contiguous().transpose(0, 1) if transposed else found
    return found.requires_grad_(), torch.randn(shape[len(shape) - weight :], dtype=dtype).requires_grad_()


@pytest.mark.parametrize("at_once", [8, 24, 2**18])
@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 4e-3)]
)
def test_results_and_gradients_are_torchs(dtype, tolerance, eps, at_once, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    for weight, transposed in ((1, False), (2, False), (1, True)):
        given = tensors(getattr(torch, dtype), weight=weight, transposed=transposed)
        before = [tensor.detach().clone() for tensor in given]
        expected = functional.rms_norm(given[0], given[1].shape, given[1], eps)
        found, scale = rms_norm(*given, eps)
        gradient = torch.randn_like(expected)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert scale.dtype == (torch.float64 if dtype == "float64" else torch.float32)
        pairs = zip(
            torch.autograd.grad(found, given, gradient), torch.autograd.grad(expected, given, gradient), strict=True
        )
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=8 * tolerance)
        assert all(torch.equal(tensor, was) for tensor, was in zip(given, before, strict=True))


def test_the_operators_keep_what_torch_asks_of_operators():
    input, weight = tensors(torch.float32)
    torch.library.opcheck(rms_norm, (input, weight, 1e-5))
    _, scale = rms_norm(input, weight, 1e-5)
    torch.library.opcheck(rms_norm_backward, (torch.randn_like(input), input.detach(), scale, weight.detach()))


class Normalized(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(8, **options), nn.Linear(8, 8)

    def forward(self, input):
        return self.linear(self.norm(input)).square().mean()


def targets_of(model):
    traced = trace_step(model, (torch.randn(4, 8, dtype=model.linear.weight.dtype),), {})
    return [operator.target for operator in traced.graph.operators]


def test_a_trace_has_one_operator_each_way():
    found = targets_of(Normalized())
    assert found.count("meshwright.rms_norm.default") == found.count("meshwright.rms_norm_backward.default") == 1
    assert not any("rsqrt" in target for target in found)
    assert functional.rms_norm.__module__ == "torch.nn.functional", "torch's function is back"


def test_what_has_no_weight_or_another_dtype_is_left_to_torch():
    without = targets_of(Normalized(elementwise_affine=False))
    assert "aten.rsqrt.default" in without
    mixed = Normalized()
    mixed.linear = mixed.linear.to(torch.bfloat16)
    with rms_norm_as_one_operator():
        input = torch.randn(2, 8, dtype=torch.bfloat16)
        assert torch.equal(functional.rms_norm(input, (8,), mixed.norm.weight), mixed.norm(input))
        for shape, weight in (((4,), torch.ones(4)), ((2, 8), torch.ones(8))):
            with pytest.raises(RuntimeError, match="normalized_shape"):
                functional.rms_norm(torch.randn(2, 8), shape, weight)


def test_torchs_kernels_take_the_arguments_and_give_the_shapes():
    schema = aten._fused_rms_norm.default._schema
    assert [argument.name for argument in schema.arguments] == ["input", "normalized_shape", "weight", "eps"]
    with FakeTensorMode():
        input = torch.empty(3, 5, 8, dtype=torch.bfloat16, device="cuda")
        weight, scale = torch.empty(8, dtype=torch.bfloat16, device="cuda"), torch.empty(3, 5, 1, device="cuda")
        found = aten._fused_rms_norm_backward.default(input, input, [8], scale, weight, [True, True])
        expected = rms_norm_backward(input, input, scale, weight)
        for ours, theirs in zip(expected, found, strict=True):
            assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
