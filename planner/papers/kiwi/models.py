"""The transformers of the KIWI paper (section 4), as steps for ``meshwright plan`` and the benchmarks.

The paper gives 4 layers, hidden size 5120, 40 heads, batch 16 and 32-bit floats. It gives neither sequence
length (1024 here), nor feed-forward size (four times the hidden size here), nor a vocabulary. So layers alone
are trained, from given hidden states towards given ones with a mean square loss: there is no embedding and no
head that could outweigh them. Attention is written out, so that scores and probabilities are operators.

A step is named as any function of a user: ``planner.papers.kiwi.models:encoder``. Memory and time of a step are the
layers', its number of operators depends on how finely they are written: :func:`encoder_of_primitives` writes
normalisation, softmax and GELU out as a compiler of primitives such as XLA sees them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN = 5120
HEADS = 40

Step = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Tensor]]
"""Module, example arguments and keyword arguments of its forward, and the loss."""


def encoder(
    batch: int = 16,
    sequence: int = 1024,
    layers: int = 4,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    *,
    hidden: int = HIDDEN,
    heads: int = HEADS,
) -> Step:
    """Encoder: attention in both directions, normalisation behind each residual (Devlin et al. 2018).

    Parameters
    ----------
    batch, sequence
        Size of the global batch of hidden states.
    layers
        Number of layers.
    dropout
        Probability behind the softmax of attention and at the end of each residual branch.
    dtype
        Type of parameters and activations.
    hidden, heads
        Width of the hidden states and attention heads that divide it.
    """
    parts = [EncoderLayer(hidden, heads, dropout, FUSED) for _ in range(layers)]
    return _step(parts, (batch, sequence, hidden), dtype)


def encoder_of_primitives(
    batch: int = 16,
    sequence: int = 1024,
    layers: int = 4,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    *,
    hidden: int = HIDDEN,
    heads: int = HEADS,
) -> Step:
    """As :func:`encoder`, with normalisation, softmax and GELU in sums, products and exponentials."""
    parts = [EncoderLayer(hidden, heads, dropout, PRIMITIVE) for _ in range(layers)]
    return _step(parts, (batch, sequence, hidden), dtype)


def decoder(
    batch: int = 16,
    sequence: int = 1024,
    layers: int = 4,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    *,
    hidden: int = HIDDEN,
    heads: int = HEADS,
) -> Step:
    """Decoder: causal attention, normalisation at the start of each residual branch (Radford et al. 2019)."""
    parts = [DecoderLayer(hidden, heads, dropout, FUSED) for _ in range(layers)]
    return _step(parts, (batch, sequence, hidden), dtype)


def _step(layers: Sequence[nn.Module], shape: tuple[int, int, int], dtype: torch.dtype) -> Step:
    states, labels = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    return Stack(layers).to(dtype), (states,), {"labels": labels}, mean_square_error


def mean_square_error(output: Tensor, labels: Tensor) -> Tensor:
    """Loss towards given hidden states."""
    return functional.mse_loss(output, labels)


class NormalizationOfPrimitives(nn.Module):
    """Layer normalisation over the last dimension, ``width`` wide (Ba et al. 2016, equation 4)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, states: Tensor) -> Tensor:
        """Normalise rows."""
        centred = states - states.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred * (variance + 1e-5).rsqrt() * self.weight + self.bias


def softmax_of_primitives(scores: Tensor) -> Tensor:
    """Softmax over the last dimension; the maximum is a constant to autograd, as in ``jax.nn.softmax``."""
    exponentials = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def gelu_of_primitives(states: Tensor) -> Tensor:
    """GELU with a hyperbolic tangent (Hendrycks and Gimpel 2016, section 2)."""
    inner = math.sqrt(2 / math.pi) * (states + 0.044715 * states * states * states)
    return 0.5 * states * (1 + inner.tanh())


@dataclass(frozen=True)
class Kernels:
    """The operators that a layer is written in: fused kernels or primitives."""

    normalization: Callable[[int], nn.Module]
    softmax: Callable[[Tensor], Tensor]
    gelu: Callable[[Tensor], Tensor]


FUSED = Kernels(nn.LayerNorm, partial(functional.softmax, dim=-1), partial(functional.gelu, approximate="tanh"))
PRIMITIVE = Kernels(NormalizationOfPrimitives, softmax_of_primitives, gelu_of_primitives)


class Stack(nn.Module):
    """Layers one after another."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, states: Tensor) -> Tensor:
        """Apply all layers."""
        for layer in self.layers:
            states = layer(states)
        return states


class Attention(nn.Module):
    """Self-attention of ``heads`` heads with its scores written out (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, hidden: int, heads: int, dropout: float, kernels: Kernels, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.kernels = heads, causal, kernels
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden) for _ in range(4))
        self.drop = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Mix the positions of each sequence; shapes ``(batch, sequence, hidden)``."""
        query, key, value = (self._split(project(states)) for project in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if self.causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(ahead, torch.finfo(scores.dtype).min)
        mixed = self.drop(self.kernels.softmax(scores)) @ value
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _split(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], self.heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them, four times as wide inside."""

    def __init__(self, hidden: int, kernels: Kernels) -> None:
        super().__init__()
        self.up, self.down, self.gelu = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden), kernels.gelu

    def forward(self, states: Tensor) -> Tensor:
        """Apply to every position."""
        result: Tensor = self.down(self.gelu(self.up(states)))
        return result


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual and then normalised."""

    def __init__(self, hidden: int, heads: int, dropout: float, kernels: Kernels) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, dropout, kernels, causal=False)
        self.feed_forward = FeedForward(hidden, kernels)
        self.norm1, self.norm2 = kernels.normalization(hidden), kernels.normalization(hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Apply one layer."""
        states = self.norm1(states + self.drop(self.attention(states)))
        result: Tensor = self.norm2(states + self.drop(self.feed_forward(states)))
        return result


class DecoderLayer(nn.Module):
    """Causal attention and feed-forward of normalised states, each with a residual."""

    def __init__(self, hidden: int, heads: int, dropout: float, kernels: Kernels) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, dropout, kernels, causal=True)
        self.feed_forward = FeedForward(hidden, kernels)
        self.norm1, self.norm2 = kernels.normalization(hidden), kernels.normalization(hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Apply one layer."""
        states = states + self.drop(self.attention(self.norm1(states)))
        result: Tensor = states + self.drop(self.feed_forward(self.norm2(states)))
        return result
