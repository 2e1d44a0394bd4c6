"""The models of the papers on layer plans, as chains of layers.

Sizes are the papers'; missing ones are assumed, as noted below. A test compares the formulas with the printed
parameters and activations (``tests/planner/layers/test_layer_presets.py``), and :func:`paper_layers` can scale the
activations to the printed figure for comparisons with a paper's tables.

========================  =====================================================================================
OSDP                      minGPT (causal, eager attention, untied head), float32. Not given, assumed:
                          vocabulary 50,257 (it meets the printed numbers of parameters), heads of 64, sequence 96 (with
                          512 most of these models would not fit into 8 GiB at a batch of one). Pairs of layers and
                          hidden size lie inside the ranges of its Table 1. ``I&C``: all narrow layers first, so that
                          one product widens.
Galvatron-BMW, Table I    eager attention, float32; assumed: sequence 512 (images: 224, patches of 16, Swin 4 and
                          windows of 7), heads of 64 (Swin 32), vocabularies of BERT and T5
H3T, Table 2              BERT, float16, sequence 512, eager attention; vocabulary assumed. Its GPT-3-175B has the
                          layers and widths of GPT-3's own paper (Brown et al. 2020)
CAPTURE, Table I          shapes of Alpa's public benchmarks, which carry the same names and sizes; float16,
                          Wide-ResNet float32 as there
========================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from formulations.layers.layer import LayerChain, LayerProfile
from planner.graph.operator_graph import ITEM_BYTES
from planner.layers.presets.formulas import RELU, BlockShape, FormulaDevice
from planner.layers.presets.language import bert, gpt, gpt_parameters, mixture_of_experts, t5
from planner.layers.presets.vision import swin, vit, wide_resnet
from planner.machine.cluster import ClusterSpec

_BERT_VOCABULARY = 30522
_T5_VOCABULARY = 32128
_GPT2_VOCABULARY = 50257
_ALPA_GPT_VOCABULARY = 51200
_ALPA_MOE_VOCABULARY = 32000
SEQUENCE = 512
"""Tokens of a sequence of BERT, T5 and H3T's models."""

_OSDP_SEQUENCE = 96
MEBIBYTE = 2**20
"""Bytes of a MB in Galvatron-BMW, of which 1024 are a GB of its memory limits.

The paper does not define it. The authors' public scripts use 2^20 bytes: in their profile T5's layers have 48.01 and
64.01 MB of parameters (12.6 and 16.8 million numbers), and the activations of Table I are the sums of that profile.
"""

Build = Callable[[FormulaDevice, bool], tuple[LayerProfile, ...]]
"""Layers of a model on a device, attention and feed-forward modules apart or not."""


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model of a paper.

    Parameters
    ----------
    paper
        Which.
    dtype
        Torch's name of the type of its numbers.
    build
        Makes its layers.
    parameters
        Number of parameters that the paper prints; None where it prints a range only.
    activation_bytes
        Bytes per sample that the paper prints; None where it prints none.
    tensors
        Kind of a module -> name and bytes of each of its parameters, where these are known one by one.
    """

    paper: str
    dtype: str
    build: Build
    parameters: float | None = None
    activation_bytes: int | None = None
    tensors: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)


def paper_layers(
    name: str, cluster: ClusterSpec, *, apart: bool = False, printed_activations: bool = False
) -> LayerChain:
    """Layers of a paper's model.

    Parameters
    ----------
    name
        A key of :data:`PAPER_MODELS`.
    cluster
        Where times come from.
    apart
        Whether attention and feed-forward modules are layers of their own.
    printed_activations
        Whether what stays for the backward pass is scaled so that the chain has the activations that the paper prints.

    Raises
    ------
    ValueError
        If there is no such model, or its paper prints no activations.
    """
    if name not in PAPER_MODELS:
        raise ValueError(f"paper model {name!r} is not known; choose one of {', '.join(PAPER_MODELS)}")
    model = PAPER_MODELS[name]
    layers = model.build(FormulaDevice(cluster, model.dtype), apart)
    chain = LayerChain(name, layers, model.dtype, (f"sizes from {model.paper}, storages and FLOP by formula",))
    if not printed_activations:
        return chain
    if model.activation_bytes is None:
        raise ValueError(f"{model.paper} prints no activations of {name}: leave printed_activations out")
    return with_activations(chain, model.activation_bytes)


def with_activations(chain: LayerChain, activation_bytes: int) -> LayerChain:
    """Chain with all saved activations scaled in equal proportion, so that they sum to ``activation_bytes`` exactly.

    Hidden states between layers are not scaled. The remainder of rounding goes to the last layer.

    Raises
    ------
    ValueError
        If hidden states alone take more, or no layer keeps anything.
    """
    kept = sum(layer.saved_bytes for layer in chain.layers)
    wanted = activation_bytes - (chain.activation_bytes - kept)
    if wanted < 0 or not kept:
        raise ValueError(
            f"{chain.name}: activations of {activation_bytes} bytes leave nothing to keep inside of layers"
        )
    layers = [_with_saved(layer, layer.saved_bytes * wanted // kept) for layer in chain.layers]
    missing = wanted - sum(layer.saved_bytes for layer in layers)
    layers[-1] = replace(layers[-1], saved_bytes=layers[-1].saved_bytes + missing)
    note = f"activations scaled from {chain.activation_bytes} to {activation_bytes} bytes per sample"
    return replace(chain, layers=tuple(layers), notes=(*chain.notes, note))


def _with_saved(layer: LayerProfile, saved: int) -> LayerProfile:
    if not layer.saved_bytes:
        return layer
    part = layer.split.saved_bytes * saved // layer.saved_bytes
    return replace(layer, saved_bytes=saved, split=replace(layer.split, saved_bytes=part))


def _shape(hidden: int, dtype: str, *, heads: int, feed_forward: int | None = None) -> BlockShape:
    inside = 4 * hidden if feed_forward is None else feed_forward
    return BlockShape(hidden, heads, hidden // heads, inside, ITEM_BYTES[dtype])


def _osdp(*hidden: tuple[int, int]) -> PaperModel:
    """(layers, hidden size) pairs in their order."""
    widths = [width for layers, width in hidden for _ in range(layers)]
    shape = _shape(widths[0], "float32", heads=widths[0] // 64)

    def build(device: FormulaDevice, apart: bool) -> tuple[LayerProfile, ...]:
        return gpt(
            device,
            widths,
            sequence=_OSDP_SEQUENCE,
            vocabulary=_GPT2_VOCABULARY,
            shape=shape,
            tied=False,
            apart=apart,
        )

    tensors = gpt_parameters(widths, sequence=_OSDP_SEQUENCE, vocabulary=_GPT2_VOCABULARY, item_bytes=shape.item_bytes)
    return PaperModel("OSDP", "float32", build, tensors=tensors)


def _galvatron(build: Build, parameters_m: float, activation_mb: float) -> PaperModel:
    return PaperModel("Galvatron-BMW", "float32", build, parameters_m * 1e6, round(activation_mb * MEBIBYTE))


def _galvatron_bert(layers: int, hidden: int, parameters_m: float, activation_mb: float) -> PaperModel:
    shape = _shape(hidden, "float32", heads=hidden // 64)
    return _galvatron(
        lambda device, apart: bert(device, shape, layers, sequence=SEQUENCE, vocabulary=_BERT_VOCABULARY, apart=apart),
        parameters_m,
        activation_mb,
    )


def _galvatron_vit(layers: int, hidden: int, parameters_m: float, activation_mb: float) -> PaperModel:
    # Vision transformers are usually trained without dropout, and transformers' configuration has none.
    shape = replace(_shape(hidden, "float32", heads=hidden // 64), dropout=False)
    return _galvatron(
        lambda device, apart: vit(device, shape, layers, image=224, patch=16, classes=1000, apart=apart),
        parameters_m,
        activation_mb,
    )


def _galvatron_t5(layers: int, target: int, parameters_m: float, activation_mb: float) -> PaperModel:
    shape = replace(_shape(1024, "float32", heads=16), bias=False, inner_dropout=True, activation=RELU, norm_tensors=2)
    return _galvatron(
        lambda device, apart: t5(
            device, shape, (layers, layers), sequences=(SEQUENCE, target), vocabulary=_T5_VOCABULARY, apart=apart
        ),
        parameters_m,
        activation_mb,
    )


def _galvatron_swin(third: int, parameters_m: float, activation_mb: float) -> PaperModel:
    shape = replace(_shape(320, "float32", heads=10), dropout=False)
    return _galvatron(
        lambda device, apart: swin(
            device, shape, (2, 2, third, 2), image=224, patch=4, window=7, classes=1000, apart=apart
        ),
        parameters_m,
        activation_mb,
    )


def _h3t(layers: int, hidden: int, feed_forward: int, heads: int, parameters: float) -> PaperModel:
    shape = _shape(hidden, "float16", heads=heads, feed_forward=feed_forward)

    def build(device: FormulaDevice, apart: bool) -> tuple[LayerProfile, ...]:
        return bert(device, shape, layers, sequence=SEQUENCE, vocabulary=_BERT_VOCABULARY, apart=apart)

    return PaperModel("H3T", "float16", build, parameters)


def _trace_gpt(hidden: int, parameters: float) -> PaperModel:
    shape = _shape(hidden, "float16", heads=32)

    def build(device: FormulaDevice, apart: bool) -> tuple[LayerProfile, ...]:
        return gpt(
            device,
            [hidden] * 32,
            sequence=1024,
            vocabulary=_ALPA_GPT_VOCABULARY,
            shape=shape,
            tied=True,
            apart=apart,
        )

    return PaperModel("CAPTURE", "float16", build, parameters)


def _trace_experts(hidden: int, experts: int, parameters: float) -> PaperModel:
    shape = _shape(hidden, "float16", heads=16, feed_forward=8 * hidden)

    def build(device: FormulaDevice, apart: bool) -> tuple[LayerProfile, ...]:
        return mixture_of_experts(
            device,
            shape,
            16,
            experts=experts,
            group=2048,
            sequence=1024,
            vocabulary=_ALPA_MOE_VOCABULARY,
            apart=apart,
        )

    return PaperModel("CAPTURE", "float16", build, parameters)


def _trace_resnet(width: int, parameters: float) -> PaperModel:
    def build(device: FormulaDevice, apart: bool) -> tuple[LayerProfile, ...]:
        del apart  # there is no attention
        return wide_resnet(device, depths=(3, 4, 6, 3), width=width, factor=2, image=224, classes=1000)

    return PaperModel("CAPTURE", "float32", build, parameters)


PAPER_MODELS: dict[str, PaperModel] = {
    "N&D-96x1024": _osdp((96, 1024)),
    "N&D-48x1536": _osdp((48, 1536)),
    "N&D-96x1536": _osdp((96, 1536)),
    "W&S-4x6144": _osdp((4, 6144)),
    "W&S-2x8192": _osdp((2, 8192)),
    "W&S-4x8192": _osdp((4, 8192)),
    "I&C-22x1024+2x4096": _osdp((22, 1024), (2, 4096)),
    "I&C-15x1024+9x4096": _osdp((15, 1024), (9, 4096)),
    "I&C-92x1024+4x4096": _osdp((92, 1024), (4, 4096)),
    "BERT-Huge-32": _galvatron_bert(32, 1280, 672, 3149.39),
    "BERT-Huge-48": _galvatron_bert(48, 1280, 987, 4657.51),
    "BERT-xHuge": _galvatron_bert(128, 2560, 10200, 24210.05),
    "ViT-Huge-32": _galvatron_vit(32, 1280, 632, 646.5),
    "ViT-Huge-48": _galvatron_vit(48, 1280, 947, 968.59),
    "ViT-xHuge": _galvatron_vit(128, 2560, 10100, 5313.9),
    "T5-Large-32": _galvatron_t5(16, 512, 502, 4119.66),
    "T5-Large-48": _galvatron_t5(24, 512, 737, 6107.75),
    "T5-512/4-32": _galvatron_t5(16, 4, 502, 1777.06),
    "T5-512/4-48": _galvatron_t5(24, 4, 737, 2473.10),
    "Swin-Huge-32": _galvatron_swin(26, 701, 726.59),
    "Swin-Huge-48": _galvatron_swin(42, 1016, 1016.8),
    "H3T-1.8B": _h3t(48, 1024, 16384, 32, 1.84e9),
    "H3T-6B": _h3t(48, 1024, 65536, 128, 6.68e9),
    "H3T-13B": _h3t(48, 2048, 65536, 128, 1.38e10),
    "H3T-100B": _h3t(56, 12288, 49152, 96, 1.02e11),
    "GPT-3-175B": _h3t(96, 12288, 49152, 96, 1.75e11),
    "GPT-3-2.6B": _trace_gpt(2560, 2.6e9),
    "GPT-3-6.7B": _trace_gpt(4096, 6.7e9),
    "MoE-2.4B": _trace_experts(1024, 16, 2.4e9),
    "MoE-7.1B": _trace_experts(1280, 32, 7.1e9),
    "Wide-ResNet-1B": _trace_resnet(320, 1.0e9),
    "Wide-ResNet-2B": _trace_resnet(448, 2.0e9),
}
"""By name. OSDP's carry their layers and hidden sizes."""
