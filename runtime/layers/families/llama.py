"""Llama as units: transformers' ``LlamaForCausalLM``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from runtime.layers.families.causal import causal_family
from runtime.layers.families.units import Carried, FamilyError, LayerUnit, ModelFamily, TensorRules, causal_mask_of


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
        found = self.block(
            hidden,
            attention_mask=causal_mask_of(self.block.self_attn, hidden, length),
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
    return causal_family(model, LlamaEmbedding("embedding", inner.embed_tokens), blocks, inner.norm)
