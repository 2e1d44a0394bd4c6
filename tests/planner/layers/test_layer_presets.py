"""The papers' models by formula, beside what the papers print."""

from __future__ import annotations

from itertools import pairwise

import pytest

from formulations.layers.layer import ProfileSource
from planner.graph.operator_graph import ITEM_BYTES
from planner.layers.presets.paper_models import PAPER_MODELS, paper_layers, with_activations
from planner.machine.cluster import load_cluster

TITAN = load_cluster("titan-rtx-8-pcie")

PARAMETERS = 0.02
"""Greatest relative deviation from a printed number of parameters; Wide-ResNet-2B and GPT-3-2.6B are rounded names."""

ACTIVATIONS = {
    "BERT-Huge-32": -0.082,
    "BERT-Huge-48": -0.083,
    "BERT-xHuge": -0.082,
    "ViT-Huge-32": -0.089,
    "ViT-Huge-48": -0.088,
    "ViT-xHuge": -0.115,
    "T5-Large-32": -0.187,
    "T5-Large-48": -0.189,
    "T5-512/4-32": -0.277,
    "T5-512/4-48": -0.223,
    "Swin-Huge-32": -0.066,
    "Swin-Huge-48": -0.068,
}
"""Deviation of the activations from Table I of Galvatron-BMW, its MB taken as 2^20 bytes.

That is what they are in the authors' public scripts (48.01 and 64.01 of parameters in T5's layers), and Table I is the
sum of their profile of single layers and some 140 MiB around them: 94.07 MiB per sample for a layer of BERT-Huge, 91.00
and 157.76 for encoder and decoder layers of T5-Large. BERT and the models of images are 7 to 9 % above the formulas
(ViT-xHuge 12 %), and T5 at 512 tokens 19 %, for a reason of its own: its layers hold one more tensor of the
size of the scores, 16 MiB, for each attention (:func:`test_t5_lacks_a_tensor_of_scores_for_each_attention`). It may be
the position bias with the mask added: a layer that is profiled alone makes one for itself, while one serves all layers
of a model. That is a guess; the size is not.

T5 at 512/4 contradicts that profile: from 32 to 48 layers it grows by 87.0 MiB for an encoder and a decoder layer
together, less than the encoder layer alone, and leaves 385 MiB for embeddings and a head of four tokens.
"""


def printed(with_figure):
    return [name for name, model in PAPER_MODELS.items() if getattr(model, with_figure) is not None]


@pytest.mark.parametrize("name", printed("parameters"))
def test_parameters_are_those_that_the_paper_prints(name):
    model, chain = PAPER_MODELS[name], paper_layers(name, TITAN)
    assert chain.parameter_bytes / ITEM_BYTES[model.dtype] == pytest.approx(model.parameters, rel=PARAMETERS)


@pytest.mark.parametrize("name", printed("activation_bytes"))
def test_activations_deviate_from_the_printed_ones_as_known(name):
    deviation = paper_layers(name, TITAN).activation_bytes / PAPER_MODELS[name].activation_bytes - 1
    assert deviation == pytest.approx(ACTIVATIONS[name], abs=0.001)


def test_t5_lacks_a_tensor_of_scores_for_each_attention():
    """Beside the authors' profile, in MiB; Table I is the sum of that profile and of what lies around the layers."""
    mebibyte, scores = 2**20, 16 * 512 * 512 * 4 / 2**20
    chain = paper_layers("T5-Large-32", TITAN)
    by_name = {layer.name: layer for layer in chain.layers}
    states = 512 * 1024 * 4
    encoder, decoder = ((by_name[f"{side}.3"].saved_bytes + states) / mebibyte for side in ("encoder", "decoder"))
    assert encoder + scores == pytest.approx(91.003, abs=0.01)
    assert decoder + 2 * scores == pytest.approx(157.755, abs=0.3)
    around = chain.activation_bytes / mebibyte - 16 * (encoder + decoder)
    printed_mib = PAPER_MODELS["T5-Large-32"].activation_bytes / mebibyte
    assert 16 * (91.003 + 157.755) + around == pytest.approx(printed_mib, rel=0.001)


@pytest.mark.parametrize("name", printed("activation_bytes"))
def test_activations_scale_to_the_printed_ones_exactly(name):
    chain, plain = paper_layers(name, TITAN, printed_activations=True), paper_layers(name, TITAN)
    assert chain.activation_bytes == PAPER_MODELS[name].activation_bytes
    assert [layer.input_bytes for layer in chain.layers] == [layer.input_bytes for layer in plain.layers]
    assert any("scaled" in note for note in chain.notes)


@pytest.mark.parametrize(
    ("family", "layers", "hidden", "billions"),
    [
        ("N&D", (48, 96), (1024, 1536), (1.3, 2.9)),
        ("W&S", (2, 4), (6144, 12288), (1.7, 4.0)),
        ("I&C", (24, 96), (1024, 4096), (0.9, 2.3)),
    ],
)
def test_osdp_pairs_lie_inside_table_1(family, layers, hidden, billions):
    names = [name for name in PAPER_MODELS if name.startswith(family)]
    assert len(names) == 3
    for name in names:
        pairs = [tuple(map(int, pair.split("x"))) for pair in name.removeprefix(f"{family}-").split("+")]
        depth = sum(count for count, _ in pairs)
        assert layers[0] <= depth <= layers[1]
        assert all(hidden[0] <= width <= hidden[1] for _, width in pairs)
        assert len(paper_layers(name, TITAN, apart=True)) == 2 * depth + 2  # operators
        parameters = paper_layers(name, TITAN).parameter_bytes / 4e9
        assert billions[0] <= round(parameters, 1) <= billions[1]


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_modules_apart_are_the_same_model(name):
    chain, apart = paper_layers(name, TITAN), paper_layers(name, TITAN, apart=True)
    assert apart.parameter_bytes == chain.parameter_bytes
    assert apart.activation_bytes == chain.activation_bytes
    for figure in ("forward_seconds", "backward_seconds", "fixed_seconds"):
        sums = [sum(getattr(layer, figure) for layer in model.layers) for model in (chain, apart)]
        assert sums[0] == pytest.approx(sums[1])
    for figure in ("parameter_bytes", "reduced_bytes"):
        sums = [sum(getattr(layer.split, figure) for layer in model.layers) for model in (chain, apart)]
        assert sums[0] == sums[1]


@pytest.mark.parametrize("name", PAPER_MODELS)
@pytest.mark.parametrize("apart", [False, True])
def test_every_boundary_is_handed_over(name, apart):
    chain = paper_layers(name, TITAN, apart=apart)
    for before, after in pairwise(chain.layers):
        assert after.input_bytes == before.output_bytes, after.name
    assert chain.layers[-1].output_bytes == 0
    assert {layer.bytes_source for layer in chain.layers} == {ProfileSource.PRESET}


def test_an_encoders_output_is_carried_through_the_decoder():
    chain = paper_layers("T5-Large-32", TITAN)
    memory = 512 * 1024 * 4
    carried = {layer.name: layer.carried_bytes for layer in chain.layers if layer.carried_bytes}
    assert carried == {f"decoder.{position}": memory for position in range(1, 16)}
    first = next(layer for layer in chain.layers if layer.name == "decoder.0")
    assert first.input_bytes == 2 * memory
    assert first.boundary_bytes == chain.layers[-2].boundary_bytes


def test_tensor_parallelism_divides_blocks_by_heads_and_leaves_the_ends_whole():
    chain = paper_layers("BERT-Huge-32", TITAN)
    block, hidden = chain.layers[1], 1280
    assert block.allows(4)
    assert not block.allows(8)  # 20 heads
    assert block.split.reduced_bytes == 2 * 512 * hidden * 4
    # Undivided: two normalisations and the biases behind the two products by rows.
    assert block.parameter_bytes - block.split.parameter_bytes == 4 * (2 * 2 * hidden + 2 * hidden)
    assert chain.layers[0].allows(8)
    assert chain.layers[0].on_one_of(8).parameter_bytes == chain.layers[0].parameter_bytes


def test_unknown_names_and_figures_say_what_is_known():
    with pytest.raises(ValueError, match=r"paper model 'BERT' is not known; choose one of N&D-96x1024"):
        paper_layers("BERT", TITAN)
    with pytest.raises(ValueError, match="H3T prints no activations of H3T-6B"):
        paper_layers("H3T-6B", TITAN, printed_activations=True)
    with pytest.raises(ValueError, match="activations of 1 bytes leave nothing"):
        with_activations(paper_layers("BERT-Huge-32", TITAN), 1)
