"""Special tensors: results of collectives that still run, and tensors without data."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def waited(tensor: Tensor) -> Tensor:
    """Plain tensor of a functional collective's result, once the collective is done; any other tensor as it is."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def has_data(tensor: Tensor) -> bool:
    """Whether a tensor has data: DTensor looks for an operator's placements with tensors that have none."""
    return not isinstance(tensor, FakeTensor)
