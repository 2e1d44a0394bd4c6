"""Layer profiles: what tensor parallelism leaves on one device, what a chain adds up to, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from formulations.layers.layer import UNDIVIDED, LayerChain, LayerProfile, ProfileSource, SplitPart

LAYER = LayerProfile(
    name="block",
    kind="block",
    parameter_bytes=100,
    input_bytes=10,
    unread_input_bytes=3,
    output_bytes=20,
    saved_bytes=70,
    fixed_saved_bytes=5,
    forward_workspace_bytes=11,
    backward_workspace_bytes=31,
    forward_seconds=1.0,
    backward_seconds=2.0,
    forward_fixed_seconds=0.25,
    backward_fixed_seconds=0.5,
    split=SplitPart(
        divisor=12,
        parameter_bytes=90,
        saved_bytes=61,
        forward_workspace_bytes=8,
        backward_workspace_bytes=24,
        forward_seconds=0.8,
        backward_seconds=1.6,
        reduced_bytes=20,
    ),
    bytes_source=ProfileSource.PRESET,
    seconds_source=ProfileSource.MEASURED,
)


def test_one_device_of_a_group_holds_the_whole_rest_and_its_share():
    share = LAYER.on_one_of(4)
    assert share.parameter_bytes == 10 + 23  # 90 / 4, rounded up
    assert share.saved_bytes == 9 + 16
    assert share.forward_workspace_bytes == 3 + 2
    assert share.backward_workspace_bytes == 7 + 6
    assert share.forward_seconds == pytest.approx(0.2 + 0.2)
    assert share.backward_seconds == pytest.approx(0.4 + 0.4)
    assert share.split == SplitPart(reduced_bytes=20)
    unchanged = ("input_bytes", "output_bytes", "fixed_saved_bytes", "forward_fixed_seconds", "backward_fixed_seconds")
    assert all(getattr(share, name) == getattr(LAYER, name) for name in unchanged)


def test_a_group_of_one_reduces_nothing():
    assert LAYER.on_one_of(1) == replace(LAYER, split=UNDIVIDED)


@pytest.mark.parametrize(("degree", "possible"), [(1, True), (2, True), (3, True), (12, True), (8, False), (0, False)])
def test_degrees_divide_heads(degree, possible):
    assert LAYER.allows(degree) is possible
    if not possible:
        with pytest.raises(ValueError, match=f"layer block cannot be split in {degree}: use a degree that divides 12"):
            LAYER.on_one_of(degree)


def test_any_degree_repeats_what_is_not_divided():
    whole = replace(LAYER, split=UNDIVIDED)
    assert whole.on_one_of(7) == whole


def test_a_chain_counts_every_storage_once():
    first = replace(LAYER, name="first", input_bytes=1000, unread_input_bytes=0)
    chain = LayerChain("two", (first, replace(LAYER, name="second")))
    assert len(chain) == 2
    assert chain.parameter_bytes == 200
    assert chain.activation_bytes == 70 + (10 - 3) + 70  # the samples are no activations


def test_sums_and_boundaries():
    assert LAYER.fixed_seconds == 0.75
    assert replace(LAYER, carried_bytes=4).boundary_bytes == 14


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("saved_bytes", -1),
        ("forward_seconds", float("nan")),
        ("backward_seconds", float("inf")),
        ("unread_input_bytes", 11),
        ("split", replace(LAYER.split, saved_bytes=71)),
        ("split", replace(LAYER.split, forward_seconds=1.5)),
    ],
)
def test_impossible_figures_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match="layer block: "):
        replace(LAYER, **{field: value})


def test_impossible_parts_are_refused():
    with pytest.raises(ValueError, match="split part: reduced_bytes is -1"):
        SplitPart(reduced_bytes=-1)


def test_chains_need_layers_with_names_of_their_own():
    with pytest.raises(ValueError, match="model empty has no layers"):
        LayerChain("empty", ())
    with pytest.raises(ValueError, match="two layers named block"):
        LayerChain("twice", (LAYER, LAYER))
