"""Profile files: what was saved comes back, and what is damaged is refused with its place."""

from __future__ import annotations

import json

import pytest

from planner.layers.presets.paper_models import paper_layers
from planner.layers.profiles.files import LayerFileError, load_layers, save_layers
from planner.machine.cluster import load_cluster

CHAIN = paper_layers("T5-512/4-32", load_cluster("titan-rtx-8-pcie"))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "folder" / "layers.json"
    save_layers(CHAIN, path)
    return path


def test_a_chain_comes_back_to_the_last_digit(saved):
    assert load_layers(saved) == CHAIN


def test_equal_chains_give_equal_files(saved, tmp_path):
    save_layers(load_layers(saved), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == saved.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.update(version=2), "version: Input should be 1"),
        (lambda document: document.pop("dtype"), "dtype: Field required"),
        (lambda document: document.update(comment="mine"), "comment: Extra inputs"),
        (lambda document: document["layers"][3].pop("saved_bytes"), r"layers\.3\.saved_bytes: Field required"),
        (lambda document: document["layers"][3].update(size=1), r"layers\.3\.size: Unexpected keyword"),
        (lambda document: document["layers"][3]["split"].update(heads=2), r"layers\.3\.split\.heads: Unexpected"),
        (lambda document: document["layers"][3].update(saved_bytes="12"), r"layers\.3\.saved_bytes: Input should be"),
        (lambda document: document["layers"][3].update(saved_bytes=1.5), r"layers\.3\.saved_bytes: Input should be"),
        (lambda document: document["layers"][3].update(bytes_source="guessed"), r"layers\.3\.bytes_source: Input"),
        (lambda document: document["layers"][3].update(saved_bytes=-1), "saved_bytes is -1"),
        (lambda document: document["layers"][3].update(name="head"), "two layers named head"),
        (lambda document: document.update(layers=[]), "has no layers"),
    ],
)
def test_damage_is_refused_with_its_place(saved, change, message):
    document = json.loads(saved.read_text())
    change(document)
    saved.write_text(json.dumps(document))
    with pytest.raises(LayerFileError, match=message) as refused:
        load_layers(saved)
    assert str(saved) in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": NaN}'])
def test_what_is_no_profile_is_refused(tmp_path, content):
    path = tmp_path / "layers.json"
    path.write_bytes(content)
    with pytest.raises(LayerFileError, match=r"layers\.json"):
        load_layers(path)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(LayerFileError, match=r"absent\.json cannot be read: No such file"):
        load_layers(tmp_path / "absent.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(LayerFileError, match="cannot be written"):
        save_layers(CHAIN, tmp_path / "file" / "layers.json")
