"""Memory of torch's allocator that libraries of CUDA keep for themselves, which no plan holds."""

from __future__ import annotations

import torch


def library_workspace_bytes(device: torch.device) -> int:
    """Bytes that cuBLAS keeps of torch's allocator on the current stream, measured by first matrix products.

    They depend on the device and on ``CUBLAS_WORKSPACE_CONFIG``. What cuBLAS had before is given back first. The thread
    of a backward has a workspace of its own.
    """
    torch._C._cuda_clearCublasWorkspaces()
    factor, gradient = torch.ones(16, 16, device=device, requires_grad=True), torch.ones(16, 16, device=device)
    torch.autograd.grad(factor.sum(), factor)  # the thread takes the device's context, which cuBLAS needs
    before = torch.cuda.memory_allocated(device)
    torch.autograd.grad(torch.mm(factor, factor), factor, gradient)
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before
