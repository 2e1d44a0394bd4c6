"""Llama as units: transformers' ``LlamaForCausalLM``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from runtime.layer_family_gpt2 import LanguageModelHead
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


class LlamaEmbedding(LayerUnit):
    """Token embeddings."""

    takes = (Carried.BATCH,)
    rules = TensorRules(vocabulary=("tokens",))
    is_block = False

    def __init__(self, name: str, tokens: Any) -> None:
        super().__init__(name)
        self.tokens = tokens

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Hidden states of token ids."""
        return (self.tokens(carried[0]),)


class LlamaBlock(LayerUnit):
    """One block; every block computes the rotations of its positions itself, from a table that has no parameters."""

    rules = TensorRules(
        column=(*(f"block.self_attn.{part}_proj" for part in "qkv"), "block.mlp.gate_proj", "block.mlp.up_proj"),
        row=("block.self_attn.o_proj", "block.mlp.down_proj"),
        norms=("block.input_layernorm", "block.post_attention_layernorm"),
        attention=("block.self_attn",),
    )

    roles = MappingProxyType({"attention": ("block.self_attn",), "mlp": ("block.mlp",)})

    def __init__(self, name: str, block: Any, rotary: Any, key_value_heads: int) -> None:
        super().__init__(name, key_value_heads)
        self.block, self.rotary = block, rotary

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Hidden states after the block."""
        (hidden,) = carried
        length = self.length(hidden)
        positions = torch.arange(length, device=hidden.device)[None]
        attention: Any = self.block.self_attn
        causal_by_itself = has_causal_kernel(attention.config._attn_implementation)
        found = self.block(
            hidden,
            attention_mask=None if causal_by_itself else causal_mask(hidden, length),
            position_ids=positions,
            position_embeddings=self.rotary(hidden, positions),
        )
        return (found if isinstance(found, Tensor) else found[0],)


def llama_family(model: Any) -> ModelFamily:
    """Units of a Llama language model.

    Raises
    ------
    FamilyError
        Its rotations depend on the sequences that it has seen.
    """
    inner = model.model
    if inner.rotary_emb.rope_type in ("dynamic", "longrope"):
        raise FamilyError(f"Llama with rotations of type {inner.rotary_emb.rope_type} has no layer executor")
    heads = model.config.num_key_value_heads
    blocks = [
        LlamaBlock(f"model.layers.{index}", block, inner.rotary_emb, heads) for index, block in enumerate(inner.layers)
    ]
    return ModelFamily(
        units=(
            LlamaEmbedding("embedding", inner.embed_tokens),
            *blocks,
            LanguageModelHead("head", inner.norm, model.lm_head),
        ),
        arguments=("input_ids", "labels"),
        inputs=lambda batch: (batch["input_ids"],),
        targets=lambda batch: shifted_left(batch["labels"]),
        float_loss=True,
        sequence=lambda batch: (batch["input_ids"].shape[1],),
        dropout=largest_dropout(model),
    )
