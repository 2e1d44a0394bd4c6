"""Memory of torch's allocator that libraries of CUDA keep for themselves, which no plan holds."""

from __future__ import annotations

import torch


def library_workspace_bytes(device: torch.device) -> int:
    """Bytes that cuBLAS keeps of torch's allocator on the current stream, measured by a first matrix product.

    They depend on the device and on ``CUBLAS_WORKSPACE_CONFIG``. What cuBLAS had before is given back first.
    """
    torch._C._cuda_clearCublasWorkspaces()
    factor = torch.ones(16, 16, device=device)
    before = torch.cuda.memory_allocated(device)
    torch.mm(factor, factor)
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before
