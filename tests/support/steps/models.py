"""Small training steps of every kind that users bring, and some that no planner can take.

Each function returns ``(module, example_args, example_kwargs, loss_fn)`` as the contract for users asks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Tensor] | None]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.query_key_value(hidden).split(width, dim=2)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in split)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.drop(self.attention(self.norm1(hidden)))
        return hidden + self.drop(self.mlp(self.norm2(hidden)))


class GPT(nn.Module):
    def __init__(
        self,
        vocabulary: int = 96,
        positions: int = 32,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def token_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def class_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels)


def mean_square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def token_examples(batch: int, sequence: int, vocabulary: int = 96) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (batch, sequence))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    return {"input_ids": tokens, "labels": labels}


def gpt(batch: int = 4, sequence: int = 16, **options: Any) -> Step:
    return GPT(**options), (), token_examples(batch, sequence), token_loss


def tied_gpt(batch: int = 4, sequence: int = 16) -> Step:
    return gpt(batch, sequence, tied=True)


def dropout_gpt(batch: int = 4, sequence: int = 16) -> Step:
    return gpt(batch, sequence, dropout=0.1)


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of low rank (Hu et al. 2021, equation 3)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.frozen(hidden) + self.up(self.down(hidden))


def lora_gpt(batch: int = 4, sequence: int = 16) -> Step:
    model = GPT().requires_grad_(False)
    for layer in model.layers:
        layer.attention.query_key_value = LowRank(layer.attention.query_key_value, rank=4)
    return model, (), token_examples(batch, sequence), token_loss


def random_mlp(batch: int = 8, seed: int = 0) -> Step:
    """A layer or two of random widths; every fourth has one."""
    rng = random.Random(seed)
    widths = [rng.choice((8, 16, 32, 64)) for _ in range(3 if seed % 4 else 2)]
    layers = [nn.Linear(inside, outside, bias=rng.random() < 0.5) for inside, outside in pairwise(widths)]
    activation = rng.choice((nn.GELU, nn.Tanh, nn.SiLU))()
    return nn.Sequential(layers[0], activation, *layers[1:]), (torch.randn(batch, widths[0]),), {}, mean_square


def mlp(batch: int = 8) -> Step:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    return model, (torch.randn(batch, 16),), {}, mean_square


class ConvNet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.conv1(images)), 2)
        hidden = F.relu(self.norm(self.conv2(hidden)))
        hidden = hidden + self.conv3(hidden)
        return self.head(F.adaptive_avg_pool2d(hidden, 1).flatten(1))


def rms_net(batch: int = 4, sequence: int = 8) -> Step:
    """Products between normalizations by the root mean square."""
    width = 16
    module = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 32), nn.SiLU(), nn.RMSNorm(32), nn.Linear(32, width))
    return module, (torch.randn(batch, sequence, width),), {}, mean_square


def conv_net(batch: int = 4) -> Step:
    return ConvNet(), (torch.randn(batch, 4, 16, 16),), {"labels": torch.randint(8, (batch,))}, class_loss


class ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, hidden: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(hidden)), inplace=True)
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(hidden), inplace=True)


class ResNet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(ResidualBlock(width, width, 1), ResidualBlock(width, 2 * width, 2))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(images)), 1).flatten(1))


def res_net(batch: int = 4) -> Step:
    return ResNet(), (torch.randn(batch, 3, 16, 16),), {"labels": torch.randint(8, (batch,))}, class_loss


class MixtureOfExperts(nn.Module):
    """Experts with a fixed capacity: tokens beyond it are dropped (Lepikhin et al. 2020, GShard)."""

    def __init__(self, width: int = 16, experts: int = 4, chosen: int = 2, slack: float = 2.0) -> None:
        super().__init__()
        self.experts, self.chosen, self.slack = experts, chosen, slack
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * 0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        shape = hidden.shape
        hidden = hidden.reshape(-1, shape[-1])
        count = hidden.shape[0]
        capacity = int(self.slack * self.chosen * count / self.experts)
        weights, chosen = F.softmax(self.gate(hidden), -1).topk(self.chosen, -1)
        one_hot = F.one_hot(chosen, self.experts).to(hidden.dtype).view(count * self.chosen, self.experts)
        place = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1).long()
        kept = (place < capacity).to(hidden.dtype)
        place_one_hot = F.one_hot(place.clamp(max=capacity - 1), capacity).to(hidden.dtype)
        route = one_hot.unsqueeze(-1) * place_one_hot.unsqueeze(1) * kept.view(-1, 1, 1)
        route = route.view(count, self.chosen, self.experts, capacity)
        combine = (route * weights.view(count, self.chosen, 1, 1)).sum(1)
        per_expert = torch.einsum("nec,nd->ecd", route.sum(1), hidden)
        per_expert = torch.bmm(F.gelu(torch.bmm(per_expert, self.up)), self.down)
        return torch.einsum("nec,ecd->nd", combine, per_expert).view(shape)


def mixture_of_experts(batch: int = 4) -> Step:
    return MixtureOfExperts(), (torch.randn(batch, 8, 16),), {}, mean_square


class DynamicExperts(nn.Module):
    """Experts that take as many tokens as chose them: shapes depend on data."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(experts)])

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = F.softmax(self.gate(hidden), -1).max(-1)
        result = torch.zeros_like(hidden)
        for position, expert in enumerate(self.experts):
            rows = torch.where(chosen == position)[0]
            result = result.index_add(0, rows, expert(hidden[rows]) * weights[rows, None])
        return result


def dynamic_experts(batch: int = 8) -> Step:
    return DynamicExperts(), (torch.randn(batch, 16),), {}, mean_square


class Branch(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.sum() > 0:  # what the capture must name
            return hidden
        return -hidden


def data_dependent_branch(batch: int = 8) -> Step:
    return nn.Sequential(nn.Linear(16, 16), Branch()), (torch.randn(batch, 16),), {}, mean_square


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value**2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class SquareLayer(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return Square.apply(hidden)


def custom_function(batch: int = 8) -> Step:
    return nn.Sequential(nn.Linear(16, 16), SquareLayer()), (torch.randn(batch, 16),), {}, mean_square


SMALL_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96, "n_positions": 32},
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
    },
    "bert": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 96,
    },
    "vit": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
    "t5": {"num_layers": 2, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "vocab_size": 96},
}
"""Differences from the default configuration of each model type of transformers, small enough to run."""


def write_configuration(folder: Path, model_type: str) -> str:
    """Write a small ``config.json`` and give the source that names it."""
    path = folder / f"{model_type}.json"
    path.write_text(json.dumps({"model_type": model_type, **SMALL_CONFIGURATIONS[model_type]}), encoding="utf-8")
    return f"hf:{path}"
