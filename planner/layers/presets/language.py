"""Language models as chains of layers by formula: GPT, BERT, T5, mixtures of experts.

Layers are named as modules of such models usually are. Tensor parallelism leaves embeddings and heads whole on every
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from formulations.layers.layer import LayerProfile
from planner.layers.presets.formulas import (
    LABEL_BYTES,
    BlockShape,
    Boundary,
    FormulaDevice,
    Work,
    attention,
    feed_forward,
    language_head,
    layer_of,
    linear,
    lookup,
    normalization,
)
from planner.layers.presets.transformer import Stack


def gpt(
    device: FormulaDevice,
    hidden: Sequence[int],
    *,
    sequence: int,
    vocabulary: int,
    shape: BlockShape,
    tied: bool,
    apart: bool = False,
) -> tuple[LayerProfile, ...]:
    """Decoder-only transformer with embeddings of tokens and positions (Radford et al. 2019).

    Parameters
    ----------
    device
        Where times come from.
    hidden
        Hidden size of every layer; where it changes, the first module of the wider layer begins with a product.
    sequence, vocabulary
        Sizes.
    shape
        Of a block but for its widths, which follow from ``hidden``: heads of the same size, four times as wide inside.
    tied
        Whether the output embedding is the input embedding.
    apart
        Whether attention and feed-forward modules are layers of their own.
    """
    stack = Stack(device, apart)
    first, last = _resized(shape, hidden[0]), _resized(shape, hidden[-1])
    layers = [
        layer_of(
            "embedding",
            f"embedding {hidden[0]}",
            lookup(first, sequence, vocabulary + sequence, normalized=False),
            Boundary(sequence * LABEL_BYTES, first.states(sequence)),
            device,
        )
    ]
    width = hidden[0]
    for position, wide in enumerate(hidden):
        block, before = _resized(shape, wide), width
        works = attention(block, sequence, sequence)
        kind = f"gpt {wide}"
        if wide != before:
            works = [linear(sequence, before, wide, device.item_bytes), *works]
            kind = f"gpt {before} to {wide}"
        modules = [("attention", works), ("mlp", feed_forward(block, sequence))]
        entry = sequence * before * device.item_bytes
        layers += stack.block(f"layers.{position}", kind, block, sequence, modules, first_input_bytes=entry)
        width = wide
    head = [normalization(last, sequence), *language_head(last, sequence, vocabulary, weight=not tied, bias=False)]
    borrowed = vocabulary * width if tied else 0
    layers.append(
        layer_of(
            "head", f"head {width}", head, Boundary(last.states(sequence), 0), device, borrowed_parameters=borrowed
        )
    )
    return tuple(layers)


def gpt_parameters(
    hidden: Sequence[int], *, sequence: int, vocabulary: int, item_bytes: int
) -> dict[str, list[tuple[str, int]]]:
    """Name and bytes of every parameter of :func:`gpt`, by the kind of its modules; untied, with modules apart."""

    def product(name: str, width_in: int, width_out: int) -> list[tuple[str, int]]:
        return [(f"{name}.weight", width_in * width_out), (f"{name}.bias", width_out)]

    def norm(wide: int) -> list[tuple[str, int]]:
        return [("norm.weight", wide), ("norm.bias", wide)]

    found = {f"embedding {hidden[0]}": [("tokens", vocabulary * hidden[0]), ("positions", sequence * hidden[0])]}
    for before, wide in pairwise([hidden[0], *hidden]):
        kind = f"gpt {wide}" if wide == before else f"gpt {before} to {wide}"
        resize = [] if wide == before else product("resize", before, wide)
        found[f"{kind} attention"] = [
            *resize,
            *norm(wide),
            *product("projections", wide, 3 * wide),
            *product("output", wide, wide),
        ]
        found[f"{kind} mlp"] = [*norm(wide), *product("inner", wide, 4 * wide), *product("output", 4 * wide, wide)]
    found[f"head {hidden[-1]}"] = [*norm(hidden[-1]), ("weight", vocabulary * hidden[-1])]
    return {kind: [(name, item_bytes * size) for name, size in tensors] for kind, tensors in found.items()}


def _resized(shape: BlockShape, hidden: int) -> BlockShape:
    return replace(shape, hidden=hidden, heads=hidden // shape.head_size, feed_forward=4 * hidden)


def bert(
    device: FormulaDevice, shape: BlockShape, layers: int, *, sequence: int, vocabulary: int, apart: bool = False
) -> tuple[LayerProfile, ...]:
    """BERT with both of its heads for pre-training, the output embedding tied (Devlin et al. 2018)."""
    stack = Stack(device, apart)
    states, hidden = shape.states(sequence), shape.hidden
    types = 2
    embedding = lookup(shape, sequence, vocabulary + sequence + types, normalized=True)
    result = [
        layer_of("embedding", "embedding", embedding, Boundary(2 * sequence * LABEL_BYTES, states), device),
    ]
    modules = [("attention", attention(shape, sequence, sequence)), ("mlp", feed_forward(shape, sequence))]
    for position in range(layers):
        result += stack.block(f"layers.{position}", "bert", shape, sequence, modules)
    transform = [linear(sequence, hidden, hidden, device.item_bytes), normalization(shape, sequence)]
    activation = Work(moved_bytes=2 * states, made_bytes=states, saved_bytes=states)
    pooler = [linear(1, hidden, hidden, device.item_bytes), linear(1, hidden, types, device.item_bytes)]
    logits = language_head(shape, sequence, vocabulary, weight=False, bias=True)
    head = [*pooler, transform[0], activation, transform[1], *logits]
    result.append(layer_of("head", "head", head, Boundary(states, 0), device, borrowed_parameters=vocabulary * hidden))
    return tuple(result)


def t5(
    device: FormulaDevice,
    shape: BlockShape,
    layers: tuple[int, int],
    *,
    sequences: tuple[int, int],
    vocabulary: int,
    apart: bool = False,
) -> tuple[LayerProfile, ...]:
    """Encoder-decoder with relative positions (Raffel et al. 2020); embeddings of both sides and of the output are one.

    The encoder's output is the input of the decoder's embedding and is carried through the decoder.

    Parameters
    ----------
    layers, sequences
        Of the encoder and the decoder.
    """
    stack = Stack(device, apart)
    source, target = sequences
    memory, states = shape.states(source), shape.states(target)
    buckets = 32
    tokens = vocabulary * shape.hidden
    embedding = lookup(shape, source, vocabulary, normalized=False)
    result = [
        layer_of(
            "encoder.embedding",
            "encoder embedding",
            embedding,
            Boundary(source * LABEL_BYTES, memory),
            device,
        )
    ]
    positions = Work(parameters=buckets * shape.heads, launches=0)
    for position in range(layers[0]):
        own = [positions] if position == 0 else []
        modules = [
            ("attention", [*own, *attention(shape, source, source)]),
            ("mlp", feed_forward(shape, source)),
        ]
        kind = "encoder with positions" if own else "encoder"
        result += stack.block(f"encoder.{position}", kind, shape, source, modules)
    begin = [normalization(shape, source), *lookup(shape, target, 0, normalized=False)]
    result.append(
        layer_of(
            "decoder.embedding",
            "decoder embedding",
            begin,
            Boundary(memory, states + memory),
            device,
            borrowed_parameters=tokens,
        )
    )
    for position in range(layers[1]):
        own = [positions] if position == 0 else []
        modules = [
            ("attention", [*own, *attention(shape, target, target)]),
            ("cross_attention", attention(shape, target, source, source)),
            ("mlp", feed_forward(shape, target)),
        ]
        kind = "decoder with positions" if own else "decoder"
        # The normalised memory is new at the decoder's embedding: the first layer's input, carried behind it.
        blocks = stack.block(f"decoder.{position}", kind, shape, target, modules, memory)
        if position == 0:
            blocks[0] = replace(blocks[0], input_bytes=states + memory, carried_bytes=0)
        result += blocks
    head = [normalization(shape, target), *language_head(shape, target, vocabulary, weight=False, bias=False)]
    result.append(layer_of("head", "head", head, Boundary(states, 0), device, borrowed_parameters=tokens))
    return tuple(result)


def mixture_of_experts(
    device: FormulaDevice,
    shape: BlockShape,
    layers: int,
    *,
    experts: int,
    group: int,
    sequence: int,
    vocabulary: int,
    apart: bool = False,
) -> tuple[LayerProfile, ...]:
    """GShard's transformer: every other feed-forward module has experts, two per token (Lepikhin et al. 2020).

    Parameters
    ----------
    experts, group
        Number of experts, and tokens that share their capacity.
    """
    stack = Stack(device, apart)
    states = shape.states(sequence)
    embedding = lookup(shape, sequence, vocabulary + sequence, normalized=True)
    result = [layer_of("embedding", "embedding", embedding, Boundary(sequence * LABEL_BYTES, states), device)]
    for position in range(layers):
        sparse = position % 2 == 1
        mlp = _experts(shape, sequence, experts, group) if sparse else feed_forward(shape, sequence)
        modules = [("attention", attention(shape, sequence, sequence)), ("mlp", mlp)]
        result += stack.block(f"layers.{position}", "experts" if sparse else "dense", shape, sequence, modules)
    head = language_head(shape, sequence, vocabulary, weight=False, bias=True)
    tied = vocabulary * shape.hidden
    result.append(layer_of("head", "head", head, Boundary(states, 0), device, borrowed_parameters=tied))
    return tuple(result)


def _experts(shape: BlockShape, tokens: int, experts: int, group: int) -> list[Work]:
    """Gate, dispatch by a product with a mask, experts of fixed capacity (twice the tokens in all), combination."""
    item, places = shape.item_bytes, 2 * group
    mask = tokens * places * item
    routed = 2 * tokens
    dense = feed_forward(shape, routed)
    gathered = shape.states(routed)
    route = Work(flops=2 * tokens * places * shape.hidden, moved_bytes=mask + shape.states(tokens), made_bytes=gathered)
    inner = [
        replace(work, parameters=experts * work.parameters) for work in dense[1:] if work.divided or work.parameters
    ]
    return [
        normalization(shape, tokens),
        linear(tokens, shape.hidden, experts, item, bias=False),
        Work(moved_bytes=2 * mask, made_bytes=mask, saved_bytes=2 * mask, launches=4),
        replace(route, saved_bytes=gathered),
        *inner,
        replace(route, saved_bytes=gathered, made_bytes=gathered),
        Work(moved_bytes=3 * shape.states(tokens)),
    ]
