"""GPT-2 as units: transformers' ``GPT2LMHeadModel``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from runtime.layers.families.causal import causal_family
from runtime.layers.families.units import Carried, FamilyError, LayerUnit, ModelFamily, TensorRules, causal_mask_of


class Gpt2Embedding(LayerUnit):
    """Sum of token and position embeddings."""

    takes = (Carried.BATCH,)
    rules = TensorRules(vocabulary=("tokens",))
    is_block = False

    def __init__(self, name: str, transformer: Any) -> None:
        super().__init__(name)
        self.tokens, self.positions, self.dropout = transformer.wte, transformer.wpe, transformer.drop

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Hidden states of token ids."""
        (tokens,) = carried
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return (self.dropout(self.tokens(tokens) + self.positions(positions)),)


class Gpt2Block(LayerUnit):
    """One block."""

    rules = TensorRules(
        column=("block.attn.c_attn", "block.mlp.c_fc"),
        row=("block.attn.c_proj", "block.mlp.c_proj"),
        norms=("block.ln_1", "block.ln_2"),
        attention=("block.attn",),
        fused={"block.attn.c_attn": 3},
    )

    roles = MappingProxyType({"attention": ("block.attn",), "mlp": ("block.mlp",)})

    def __init__(self, name: str, block: Any) -> None:
        super().__init__(name, block.attn.num_heads)
        self.block = block

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Hidden states after the block."""
        (hidden,) = carried
        mask = causal_mask_of(self.block.attn, hidden, self.length(hidden))
        return (self.block(hidden, attention_mask=mask),)

    def share_heads(self, rank: int, size: int) -> None:
        """As in :class:`LayerUnit`."""
        super().share_heads(rank, size)
        attention: Any = self.block.attn
        attention.split_size //= size


def gpt2_family(model: Any) -> ModelFamily:
    """Units of a GPT-2 language model.

    Raises
    ------
    FamilyError
        It has cross-attention or an attention of its own kind.
    """
    config = model.config
    if config.add_cross_attention or config.reorder_and_upcast_attn:
        raise FamilyError("GPT-2 with add_cross_attention or reorder_and_upcast_attn has no layer executor: unset it")
    blocks = [Gpt2Block(f"transformer.h.{index}", block) for index, block in enumerate(model.transformer.h)]
    return causal_family(model, Gpt2Embedding("embedding", model.transformer), blocks, model.transformer.ln_f)
