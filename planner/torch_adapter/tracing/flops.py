"""FLOP of a traced operator: torch's formulas, and one for the attention kernel that CPUs use."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from planner.torch_adapter.local.operator_traits import arguments_by_name

_aten = torch.ops.aten
_CPU_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def operator_flops(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOP of one call (a multiply-add counts as two), 0 for operators that are bound by memory.

    Parameters
    ----------
    target
        The overload.
    args, kwargs, result
        Arguments and result with (fake) tensors.
    """
    causal = bool(arguments_by_name(target, args, kwargs).get("is_causal", False))
    if target is _CPU_ATTENTION:
        query, key, value = args[:3]
        return _attention_flops(query, key, value, causal=causal, products=(1, 1))
    if target is _CPU_ATTENTION_BACKWARD:
        query, key, value = args[1:4]
        # Scores again, then the gradients of value, of the scores, of query and of key.
        return _attention_flops(query, key, value, causal=causal, products=(3, 2))
    formula = flop_registry.get(target.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _attention_flops(query: Any, key: Any, value: Any, causal: bool, products: tuple[int, int]) -> int:
    """Products over the head dimension of the queries and over that of the values; a causal mask halves the scores."""
    batch, heads, queries, query_width = query.shape
    keys, value_width = key.shape[2], value.shape[3]
    flops: int = 2 * batch * heads * queries * keys * (products[0] * query_width + products[1] * value_width)
    return flops // 2 if causal else flops
