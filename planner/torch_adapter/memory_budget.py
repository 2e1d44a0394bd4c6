"""Compilation by torch with its own budget of activation memory, which is private there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config


def compiled_under(function: Callable[..., Tensor], budget: float, backend: str) -> Callable[..., Tensor]:
    """``torch.compile`` of a function, keeping a share of what it would keep for the backward without recomputation.

    Parameters
    ----------
    function
        Of tensors.
    budget
        Share from 0 (only inputs are kept) to 1 (torch's own choice).
    backend
        ``inductor``, or ``aot_eager_decomp_partition``, which runs the same partition without generated code.
    """
    made = torch.compile(function, backend=backend, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Tensor:
        with config.patch(activation_memory_budget=budget):
            result: Tensor = made(*args, **kwargs)
        return result

    return call
