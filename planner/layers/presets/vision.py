"""Models of images as chains of layers by formula: vision transformers, Swin, wide ResNets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from formulations.layers.layer import LayerProfile
from planner.layers.presets.formulas import (
    BlockShape,
    Boundary,
    FormulaDevice,
    Work,
    attention,
    feed_forward,
    layer_of,
    linear,
    normalization,
)
from planner.layers.presets.transformer import Stack


def vit(
    device: FormulaDevice,
    shape: BlockShape,
    layers: int,
    *,
    image: int,
    patch: int,
    classes: int,
    apart: bool = False,
) -> tuple[LayerProfile, ...]:
    """Vision transformer with a class token (Dosovitskiy et al. 2021)."""
    stack = Stack(device, apart)
    channels = 3
    patches = (image // patch) ** 2
    tokens, states = patches + 1, shape.states(patches + 1)
    pixels = channels * image**2 * device.item_bytes
    embedding = [
        replace(linear(patches, channels * patch**2, shape.hidden, device.item_bytes), saved_bytes=0),
        Work(parameters=(tokens + 1) * shape.hidden, moved_bytes=4 * states, made_bytes=states, launches=2),
    ]
    result = [layer_of("embedding", "embedding", embedding, Boundary(pixels, states), device)]
    modules = [("attention", attention(shape, tokens, tokens)), ("mlp", feed_forward(shape, tokens))]
    for position in range(layers):
        result += stack.block(f"layers.{position}", "vit", shape, tokens, modules)
    head = [normalization(shape, tokens), linear(1, shape.hidden, classes, device.item_bytes)]
    result.append(layer_of("head", "head", head, Boundary(states, 0), device))
    return tuple(result)


def swin(
    device: FormulaDevice,
    shape: BlockShape,
    depths: Sequence[int],
    *,
    image: int,
    patch: int,
    window: int,
    classes: int,
    apart: bool = False,
) -> tuple[LayerProfile, ...]:
    """Swin transformer (Liu et al. 2021): each stage has a quarter of the tokens and twice the width.

    Tokens are cut into windows and put back, a copy each, which stays for the products behind it. The merging of
    patches belongs to the first block of the stage that it leads to.

    Parameters
    ----------
    shape
        Of the first stage's blocks.
    """
    stack = Stack(device, apart)
    channels, item = 3, device.item_bytes
    tokens = (image // patch) ** 2
    states = shape.states(tokens)
    embedding = [
        replace(linear(tokens, channels * patch**2, shape.hidden, item), saved_bytes=0),
        normalization(shape, tokens),
    ]
    pixels = channels * image**2 * item
    result = [layer_of("embedding", "embedding", embedding, Boundary(pixels, states), device)]
    entry = states
    for stage, depth in enumerate(depths):
        for position in range(depth):
            merging: list[Work] = []
            if stage and not position:
                tokens //= 4
                merging = _merging(shape, tokens)
                heads, hidden = 2 * shape.heads, 2 * shape.hidden
                shape = replace(shape, heads=heads, hidden=hidden, feed_forward=2 * shape.feed_forward)
            states = shape.states(tokens)
            table = Work(parameters=(2 * window - 1) ** 2 * shape.heads, launches=0)
            windows = Work(moved_bytes=4 * states, made_bytes=states, launches=2)
            modules = [
                ("attention", [*merging, table, windows, *attention(shape, tokens, window**2), windows]),
                ("mlp", feed_forward(shape, tokens)),
            ]
            kind = f"swin {shape.hidden}" + (" with merging" if merging else "")
            name = f"stages.{stage}.{position}"
            result += stack.block(name, kind, shape, tokens, modules, first_input_bytes=entry)
            entry = states
    pooled = replace(normalization(shape, tokens), saved_bytes=0)  # the backward of a mean needs no input
    head = [pooled, linear(1, shape.hidden, classes, item)]
    result.append(layer_of("head", "head", head, Boundary(entry, 0), device))
    return tuple(result)


def _merging(shape: BlockShape, tokens: int) -> list[Work]:
    """Four neighbours become one token of twice the width; ``tokens`` afterwards."""
    wide = replace(shape, hidden=4 * shape.hidden)
    return [
        Work(moved_bytes=2 * wide.states(tokens), made_bytes=wide.states(tokens), saved_bytes=wide.states(tokens)),
        normalization(wide, tokens),
        linear(tokens, 4 * shape.hidden, 2 * shape.hidden, shape.item_bytes, bias=False),
    ]


def wide_resnet(
    device: FormulaDevice, *, depths: Sequence[int], width: int, factor: int, image: int, classes: int
) -> tuple[LayerProfile, ...]:
    """Wide ResNet of bottleneck blocks (Zagoruyko and Komodakis 2016), as Alpa's benchmarks write it.

    Parameters
    ----------
    depths
        Blocks of each stage.
    width, factor
        Channels of the first stage, and how much wider the convolution of three by three is.
    """
    item, channels = device.item_bytes, 3
    side = image // 2
    stem = [_convolution(side, channels, width, 7, item), _batch_norm(side, width, item)]
    side //= 2
    made = side**2 * width * item
    result = [layer_of("stem", "stem", stem, Boundary(channels * image**2 * item, made), device)]
    given, before = width, side
    for stage, depth in enumerate(depths):
        filters = width * 2**stage
        for position in range(depth):
            if stage and not position:
                side //= 2
            works = [
                *_normalized(before, given, filters, 1, item),
                *_normalized(side, filters, factor * filters, 3, item),
                _convolution(side, factor * filters, 4 * filters, 1, item),
                _batch_norm(side, 4 * filters, item),
            ]
            if given != 4 * filters:
                works += [_convolution(side, given, 4 * filters, 1, item), _batch_norm(side, 4 * filters, item)]
            boundary = Boundary(before**2 * given * item, side**2 * 4 * filters * item)
            kind = f"bottleneck {given} to {4 * filters} at {before} to {side}"
            result.append(layer_of(f"stages.{stage}.{position}", kind, works, boundary, device))
            given, before = 4 * filters, side
    head = [linear(1, given, classes, item)]
    result.append(layer_of("head", "head", head, Boundary(before**2 * given * item, 0), device))
    return tuple(result)


def _normalized(side: int, given: int, made: int, kernel: int, item: int) -> list[Work]:
    """Convolution, batch normalisation, ReLU: each leaves a tensor, ReLU its result for the next convolution too."""
    result = _batch_norm(side, made, item)
    return [_convolution(side, given, made, kernel, item), replace(result, saved_bytes=2 * result.saved_bytes)]


def _convolution(side: int, given: int, made: int, kernel: int, item: int) -> Work:
    weight = prod((given, made, kernel, kernel))
    nbytes = side**2 * made * item
    return Work(
        flops=2 * side**2 * weight,
        moved_bytes=side**2 * given * item + nbytes,
        made_bytes=nbytes,
        saved_bytes=0,
        parameters=weight,
    )


def _batch_norm(side: int, channels: int, item: int) -> Work:
    """Batch normalisation: its input stays."""
    nbytes = side**2 * channels * item
    return Work(moved_bytes=2 * nbytes, made_bytes=nbytes, saved_bytes=nbytes, parameters=2 * channels)
