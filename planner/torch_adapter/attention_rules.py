"""Sharding rules of CPU flash attention: batch and heads, with or without a mask.

DTensor has rules for the CUDA kernels only. The rules here go into our own tables and, through torch's
public ``register_sharding``, into DTensor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

aten = torch.ops.aten
ATTENTION_FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
SHARDED_DIMS = (0, 1)
"""Batch and heads of (batch, heads, sequence, head size); a head's rows and columns stay together."""


def mask_word(shape: Sequence[int], dim: int) -> str:
    """Word of a mask where attention is sharded on ``dim``: masks broadcast over dimensions of size one."""
    return f"S{dim}" if len(shape) == 4 and shape[dim] > 1 else "R"


def register_attention_rules() -> None:
    """Make the rules known to DTensor, for programs that run attention on DTensors.

    Registering again replaces the rules by the same ones.
    """
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)(_forward)
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(_backward)


def _rows(outputs: int, inputs: int, options: Sequence[Any], mask: Any) -> list[tuple[list[Any], list[Any]]]:
    """Acceptable (outputs, inputs); ``register_sharding`` wants tensor keywords last, None per constant."""
    constants: list[TorchPlacement | None] = [None] * len(options)
    replicate: TorchPlacement = Replicate()
    rows: list[tuple[list[Any], list[Any]]] = [
        ([replicate] * outputs, [replicate] * inputs + constants + ([] if mask is None else [replicate]))
    ]
    for dim in SHARDED_DIMS:
        sharded: list[Any] = [Shard(dim)] * inputs + constants
        if mask is not None:
            shape = getattr(mask, "shape", None) or mask.tensor_meta.shape
            sharded.append(replicate if mask_word(shape, dim) == "R" else Shard(dim))
        rows.append(([Shard(dim)] * outputs, sharded))
    return rows


def _forward(_query: Any, _key: Any, _value: Any, *options: Any, **keywords: Any) -> Any:
    return _rows(2, 3, options, keywords.get("attn_mask"))


def _backward(
    _gradient: Any, _query: Any, _key: Any, _value: Any, _output: Any, _logsumexp: Any, *options: Any, **keywords: Any
) -> Any:
    return _rows(3, 6, options, keywords.get("attn_mask"))
