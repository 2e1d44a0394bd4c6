"""The families of transformers: thirty of them, each planned or refused by name; speech and audio models load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.models import families, family_page
from planner.models.families import FAMILIES, FamilyRow, families_table, family_rows
from planner.models.family_page import kept_rows
from planner.models.references import ModelReference, load_step


def test_thirty_families_are_named_once() -> None:
    names = [family for kind in FAMILIES.values() for family in kind]
    assert len(names) == len(set(names)) == 30
    assert list(FAMILIES) == ["decoder", "encoder", "encoder-decoder", "vision", "speech"]


def test_a_family_is_planned_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_sizes": [8], "embedding_size": 8, "depths": [1], "layer_type": "basic", "image_size": 32}
    monkeypatch.setattr(families, "FAMILIES", {"vision": {"resnet": small}, "other": {"clap": {}, "bloom": {}}})
    planned, without_loss, function = family_rows()
    assert (planned.outcome, planned.reason) == ("planned", "")
    assert planned.operators > 20
    assert (without_loss.outcome, without_loss.operators) == ("refused", 0)
    assert "model hf:clap" in without_loss.reason
    assert "write a function module.path:function instead" in without_loss.reason
    assert function.outcome == "refused"
    assert "GeLUFunction" in function.reason
    assert "transformers/models/bloom/modeling_bloom.py:" in function.reason


def test_a_page_is_written_after_each_family_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def rows(names, begins):
        if "b" in made:
            raise KeyboardInterrupt
        made.extend(names)
        begins(names[0])
        yield FamilyRow("decoder", names[0], "planned" if names[0] != "c" else "defect", 7, ("no rule",), "", 60.0)

    monkeypatch.setattr(family_page, "family_rows", rows)
    page, said, begun = tmp_path / "families.md", [], []
    with pytest.raises(KeyboardInterrupt):
        list(kept_rows("abc", page, begun.append, said.append))
    assert "| decoder | b | planned | 7 | no rule |" in page.read_text()
    assert "of 2 families\n2 planned, in 2 minutes" in page.read_text()
    made.clear()
    found = list(kept_rows("abc", page, begun.append, said.append))
    assert (made, begun) == (["c"], ["a", "b", "c"])
    assert said == [f"2 of 3 families are known from {tmp_path / 'families.json'}"]
    assert [row.family for row in found] == ["a", "b", "c"]
    list(kept_rows("abc", page, begun.append, said.append))
    assert made == ["c", "c"], "a defect is tried again"
    monkeypatch.setattr(family_page, "version", lambda _: "other")
    made.clear()
    list(kept_rows("a", page, begun.append, said.append))
    assert made == ["a"], "rows of other versions are made again"


def test_the_table_has_a_row_for_each() -> None:
    rows = [
        FamilyRow("decoder", "a", "planned", 7, ("2 x b: no rule",), "", 1.0),
        FamilyRow("c", "d", "x", 0, (), "e|f", 1),
    ]
    assert families_table(rows).splitlines()[2:] == [
        "| decoder | a | planned | 7 | 2 x b |",
        "| c | d | x | - | e\\|f |",
    ]


@pytest.mark.parametrize(
    ("content", "shapes"),
    [
        (
            {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "max_source_positions": 16},
            {"input_features": (2, 80, 32), "labels": (2, 8)},
        ),
        ({"model_type": "wav2vec2"}, {"input_values": (2, 8 * 320), "labels": (2,)}),
    ],
)
def test_models_of_sounds_have_their_inputs(tmp_path: Path, content: dict, shapes: dict) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content | {"num_hidden_layers": 1, "encoder_layers": 1, "decoder_layers": 1}))
    step = load_step(ModelReference(f"hf:{path}", batch=2, sequence=8, dropout=0.0), device="meta")
    assert {name: tuple(tensor.shape) for name, tensor in step.example_kwargs.items()} == shapes


def test_the_page_lists_exactly_the_families() -> None:
    page = Path(families.__file__).with_name("RESULTS.md").read_text(encoding="utf-8")
    listed = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in page.splitlines() if line[:2] == "| "]
    assert listed[1:] == [(kind, family) for kind, of_kind in FAMILIES.items() for family in of_kind]
