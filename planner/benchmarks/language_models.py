"""GPT-2 and Llama in plain torch, at their own sizes and tiny: what a device is checked with, without transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Step = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Tensor] | None]

LOSS_PARTS = 8
"""Parts of the batch whose logits are made one after the other, since those of all are the largest tensors by far."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a language model; ``key_heads`` share the heads of keys and values among those of the queries."""

    layers: int
    width: int
    heads: int
    key_heads: int
    inner: int
    words: int


GPT2_MEDIUM = Sizes(24, 1024, 16, 16, 4096, 50257)
GPT2_TINY = Sizes(4, 64, 4, 4, 256, 256)
LLAMA_1B = Sizes(16, 2048, 32, 8, 8192, 128256)
LLAMA_TINY = Sizes(4, 64, 4, 2, 192, 256)


class Attention(nn.Module):
    """Causal attention; with ``rotated`` positions it turns queries and keys (Su et al. 2021)."""

    def __init__(self, sizes: Sizes, bias: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.key_heads, head = sizes.heads, sizes.key_heads, sizes.width // sizes.heads
        self.query = nn.Linear(sizes.width, sizes.width, bias=bias)
        self.key = nn.Linear(sizes.width, sizes.key_heads * head, bias=bias)
        self.value = nn.Linear(sizes.width, sizes.key_heads * head, bias=bias)
        self.out = nn.Linear(sizes.width, sizes.width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Hidden states (batch, tokens, width); ``turns`` are cosines and sines (tokens, head size)."""
        query = self.query(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (
            layer(hidden).unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for layer in (self.key, self.value)
        )
        if turns is not None:
            query, key = rotated(query, *turns), rotated(key, *turns)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.key_heads < self.heads
        )
        result: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return result


def rotated(tensor: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Queries or keys (batch, heads, tokens, head size), halves of a head turned against each other."""
    first, second = tensor.chunk(2, dim=-1)
    return tensor * cosines + torch.cat((-second, first), dim=-1) * sines


class Gpt2Block(nn.Module):
    """Attention and feed-forward with layer normalisation before each."""

    def __init__(self, sizes: Sizes, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes, True, dropout)
        self.up, self.down = nn.Linear(sizes.width, sizes.inner), nn.Linear(sizes.inner, sizes.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (batch, tokens, width)."""
        hidden = hidden + self.attention(self.first(hidden))
        inner = functional.gelu(self.up(self.second(hidden)), approximate="tanh")
        result: Tensor = hidden + self.dropout(self.down(inner))
        return result


class LlamaBlock(nn.Module):
    """Attention with rotated positions and a gated feed-forward, each after an RMS normalisation."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(sizes.width, eps=1e-5), nn.RMSNorm(sizes.width, eps=1e-5)
        self.attention = Attention(sizes, False, 0.0)
        self.gate, self.up = (nn.Linear(sizes.width, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Hidden states (batch, tokens, width)."""
        hidden = hidden + self.attention(self.first(hidden), (cosines, sines))
        inner = self.second(hidden)
        result: Tensor = hidden + self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return result


class LanguageModel(nn.Module):
    """Head and loss, with the head tied to the embedding ``words``; the norm before it is ``last``.

    ``recompute_loss`` recomputes the logits of each part in the backward by ``torch.utils.checkpoint``.
    """

    words: nn.Embedding
    last: nn.Module
    recompute_loss = False

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy in 32 bits, of hidden states (batch, tokens, width) and labels (batch, tokens)."""
        parts = zip(self.last(hidden).flatten(0, 1).chunk(LOSS_PARTS), labels.flatten().chunk(LOSS_PARTS), strict=True)
        losses = [
            checkpoint(self._part, *part, use_reentrant=False) if self.recompute_loss else self._part(*part)
            for part in parts
        ]
        return torch.stack(losses).sum() / labels.numel()

    def _part(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(hidden, self.words.weight).float()
        return functional.cross_entropy(logits, labels, reduction="sum")


class Gpt2(LanguageModel):
    """GPT-2 (Radford et al. 2019)."""

    def __init__(self, sizes: Sizes, tokens: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(sizes.words, sizes.width), nn.Embedding(tokens, sizes.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Gpt2Block(sizes, dropout) for _ in range(sizes.layers)])
        self.last = nn.LayerNorm(sizes.width)
        self.apply(_initialised)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss of tokens and labels, both (batch, tokens)."""
        hidden = self.dropout(self.words(tokens) + self.places.weight)
        for block in self.blocks:
            hidden = block(hidden)
        return self.loss(hidden, labels)


class Llama(LanguageModel):
    """Llama 3.2 (Meta 2024)."""

    def __init__(self, sizes: Sizes, tokens: int) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, sizes.width)
        self.blocks = nn.ModuleList([LlamaBlock(sizes) for _ in range(sizes.layers)])
        self.last = nn.RMSNorm(sizes.width, eps=1e-5)
        head = sizes.width // sizes.heads
        speeds = 500_000.0 ** (-torch.arange(0, head, 2) / head)
        angles = torch.arange(tokens).unsqueeze(-1) * speeds.repeat(2)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        self.apply(_initialised)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss of tokens and labels, both (batch, tokens)."""
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.cosines, self.sines)
        return self.loss(hidden, labels)


def _initialised(layer: nn.Module) -> None:
    if isinstance(layer, (nn.Linear, nn.Embedding)):
        nn.init.normal_(layer.weight, std=0.02)


def _step(module: nn.Module, sizes: Sizes, batch: int, sequence: int, dtype: torch.dtype) -> Step:
    tokens, labels = (torch.randint(sizes.words, (batch, sequence)) for _ in range(2))
    return module.to(dtype).train(), (tokens, labels), {}, None


def gpt2_medium(batch: int, sequence: int, dtype: torch.dtype, dropout: float = 0.0, layers: int = 24) -> Step:
    """GPT-2 medium, 355 million parameters."""
    sizes = replace(GPT2_MEDIUM, layers=layers)
    return _step(Gpt2(sizes, sequence, dropout), sizes, batch, sequence, dtype)


def gpt2_tiny(batch: int, sequence: int, dtype: torch.dtype, dropout: float = 0.0, layers: int = 4) -> Step:
    """GPT-2's architecture with four layers of width 64."""
    sizes = replace(GPT2_TINY, layers=layers)
    return _step(Gpt2(sizes, sequence, dropout), sizes, batch, sequence, dtype)


def llama_1b(batch: int, sequence: int, dtype: torch.dtype) -> Step:
    """Llama 3.2 of 1.24 billion parameters."""
    return _step(Llama(LLAMA_1B, sequence), LLAMA_1B, batch, sequence, dtype)


def llama_tiny(batch: int, sequence: int, dtype: torch.dtype) -> Step:
    """Llama's architecture with four layers of width 64."""
    return _step(Llama(LLAMA_TINY, sequence), LLAMA_TINY, batch, sequence, dtype)
