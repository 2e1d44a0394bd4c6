"""GPT-2 as units: transformers' ``GPT2LMHeadModel``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from runtime.layer_units import (
    Carried,
    FamilyError,
    LayerUnit,
    ModelFamily,
    TensorRules,
    causal_mask,
    has_causal_kernel,
    largest_dropout,
    shifted_left,
)


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
        attention: Any = self.block.attn
        causal_by_itself = has_causal_kernel(attention.config._attn_implementation)
        mask = None if causal_by_itself else causal_mask(hidden, self.length(hidden))
        return (self.block(hidden, attention_mask=mask),)

    def share_heads(self, rank: int, size: int) -> None:
        """As in :class:`LayerUnit`."""
        super().share_heads(rank, size)
        attention: Any = self.block.attn
        attention.split_size //= size


class LanguageModelHead(LayerUnit):
    """Last norm and output projection."""

    gives = (Carried.BATCH,)
    rules = TensorRules(vocabulary=("projection",))
    is_block = False

    def __init__(self, name: str, norm: nn.Module, projection: nn.Module) -> None:
        super().__init__(name)
        self.norm, self.projection = norm, projection

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Logits."""
        (hidden,) = carried
        return (self.projection(self.norm(hidden)),)


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
    return ModelFamily(
        units=(
            Gpt2Embedding("embedding", model.transformer),
            *blocks,
            LanguageModelHead("head", model.transformer.ln_f, model.lm_head),
        ),
        arguments=("input_ids", "labels"),
        inputs=lambda batch: (batch["input_ids"],),
        targets=lambda batch: shifted_left(batch["labels"]),
        float_loss=True,
        sequence=lambda batch: (batch["input_ids"].shape[1],),
        dropout=largest_dropout(model),
    )
