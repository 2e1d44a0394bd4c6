"""Keeps causal masks of Hugging Face models out of the graph where eager mode has none.

In eager mode these models read the position ids: where every row of the batch is one sequence, they build no mask
and attention runs its causal kernel. Without data they cannot read them and build a mask of batch x length x
length. Position ids that the model made itself (the caller passed none) are always one sequence, so the check has a
known result without data.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn


@contextmanager
def without_packing_checks(module: nn.Module) -> Iterator[None]:
    """Skip the packed-sequence check of transformers models that were called without position ids."""
    masking = sys.modules.get("transformers.masking_utils")
    modeling = sys.modules.get("transformers.modeling_utils")
    original = getattr(masking, "find_packed_sequence_indices", None)
    if original is None or modeling is None:
        yield
        return
    caller_chose_positions = False

    def remember(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal caller_chose_positions
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        given = bound.get("position_ids", bound.get("kwargs", {}).get("position_ids"))
        caller_chose_positions = given is not None

    def find_packed(position_ids: Tensor) -> Tensor | None:
        return original(position_ids) if caller_chose_positions else None

    handles = [
        model.register_forward_pre_hook(remember, with_kwargs=True)
        for model in _outermost(module, modeling.PreTrainedModel)
    ]
    try:
        with patch.object(masking, "find_packed_sequence_indices", find_packed):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _outermost(module: nn.Module, kind: type) -> Iterator[nn.Module]:
    if isinstance(module, kind):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child, kind)
