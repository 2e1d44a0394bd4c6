"""Models of the public benchmark set that have no name of their own: a mixture of experts and a U-Net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Step = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Tensor] | None]

_IMAGES, _PIXELS = 16, 64
_SEQUENCES, _TOKENS = 8, 256


def mixture_of_experts() -> Step:
    """Mixtral's architecture with two layers of eight experts, as transformers has it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=2,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=16384,
        max_position_embeddings=_TOKENS,
        use_cache=False,
    )
    module = MixtralForCausalLM(config).train()
    tokens = torch.randint(config.vocab_size, (_SEQUENCES, _TOKENS), generator=torch.Generator().manual_seed(0))
    return module, (), {"input_ids": tokens, "labels": tokens.clone()}, None


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)])
        self.short = nn.Conv2d(inputs, outputs, 1)

    def forward(self, image: Tensor) -> Tensor:
        hidden = functional.silu(self.norms[0](self.first(image)))
        hidden = self.norms[1](self.second(hidden))
        return functional.silu(hidden + self.short(image))


class UNet(nn.Module):
    """Ronneberger et al. 2015 with residual blocks and group normalisation: down, up, and a skip at every level."""

    def __init__(self, width: int = 64, levels: int = 3, classes: int = 16) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([_Block(a, b) for a, b in zip([width, *widths], widths, strict=False)])
        self.up = nn.ModuleList([_Block(2 * a, a) for a in reversed(widths[:-1])])
        self.lift = nn.ModuleList([nn.Conv2d(2 * a, a, 1) for a in reversed(widths[:-1])])
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Class scores of every pixel, shape ``(batch, classes, height, width)``."""
        hidden, kept = self.first(image), []
        for level, block in enumerate(self.down):
            hidden = block(hidden if level == 0 else functional.avg_pool2d(hidden, 2))
            kept.append(hidden)
        hidden = kept.pop()
        for lift, block in zip(self.lift, self.up, strict=True):
            wider = functional.interpolate(lift(hidden), scale_factor=2.0, mode="nearest")
            hidden = block(torch.cat([wider, kept.pop()], dim=1))
        scores: Tensor = self.last(hidden)
        return scores


def u_net() -> Step:
    """A U-Net that classifies every pixel."""
    return _pixels_step(UNet(), _IMAGES, _PIXELS)


def u_net_tiny() -> Step:
    """The same with two levels, of width 8 and 16."""
    return _pixels_step(UNet(8, 1), 2, 16)


def _pixels_step(module: UNet, images: int, pixels: int) -> Step:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(images, 3, pixels, pixels, generator=generator)
    classes = torch.randint(16, (images, pixels, pixels), generator=generator)

    def loss(scores: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(scores, classes)

    return module.train(), (given,), {"classes": classes}, loss
