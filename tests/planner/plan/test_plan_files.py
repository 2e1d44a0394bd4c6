"""Plan files: what cannot be read, does not fit the schema, or cannot be written."""

from __future__ import annotations

import pytest
from support.steps.plan_case import (
    MODEL,
    PLAN,
    document,
    edited,
    made,
    written,
)

from planner.plan.document import (
    PlanError,
    load_plan,
    save_plan,
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON: Expecting value: line 1 column 1"),
        ("{", "is not JSON"),
        ("[1, 2]", "has no version: it is no plan"),
        ("{}", "has no version"),
        ('{"version": 1}', "has version 1, this meshwright reads 2: plan again"),
        ('{"version": true}', "has version true"),
        ('{"version": "2"}', 'has version "2"'),
        ('{"version": 2, "version": 2}', "'version' occurs twice"),
        ('{"version": 2, "digest": NaN}', "NaN is no number"),
        ("[" * 100_000, "is not JSON"),
        ('{"version": 2}', r"decision: Field required \(and 2 more\)"),
    ],
)
def test_files_that_are_no_plans(tmp_path, content, message):
    with pytest.raises(PlanError, match=message) as caught:
        load_plan(written(tmp_path / "plan.json", content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("decision", "schedule", "instructions", 2, "operator"), "1", r"instructions\[2\]\.compute\.operator: Input"),
        (("decision", "schedule", "instructions", 0, "op"), "sing", r"schedule\.instructions\[0\]: Input tag 'sing'"),
        (("decision", "schedule", "placements", 0, 0), "Q", r"schedule\.placements\[0\]\[0\]: String should match"),
        (("decision", "options", "grad_accum"), 0, r"decision\.options\.grad_accum: Input should be greater"),
        (("decision", "options", "reserve_bytes"), 9999, "reserve of 9999 bytes exceeds the memory of 1500"),
        (("decision", "options", "mesh"), [4], r"schedule is for mesh \(2,\), the options say \(4,\)"),
        (("decision", "predicted", "peak_bytes"), -1, r"decision\.predicted\.peak_bytes: Input should be greater"),
        (("decision", "predicted", "peak_bytes"), 1.5, r"decision\.predicted\.peak_bytes: Input should be a valid int"),
        (("decision", "note"), "x", r"decision\.note: Extra inputs are not permitted"),
        (("decision", "created_by"), "\ud800", "plan"),
        (("record", "certificate", "status"), "splendid", r"record\.certificate\.status: Input should be 'optimal'"),
        (("digest",), "abc", "digest: String should match"),
    ],
)
def test_schema_errors_name_the_field(tmp_path, path, value, message):
    with pytest.raises(PlanError, match=message) as caught:
        load_plan(written(tmp_path / "plan.json", edited(document(), path, value)))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(PlanError, match=r"missing\.json cannot be read: No such file"):
        load_plan(tmp_path / "missing.json")
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        load_plan(tmp_path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b'{"version": \xff}')
    with pytest.raises(PlanError, match=r"is not JSON: byte 12 is no UTF-8"):
        load_plan(binary)
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        save_plan(PLAN, tmp_path / "file" / "plan.json")


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PlanError, match="cannot be written: No space left on device"):
        save_plan(made(model=MODEL.model_copy(update={"seed": 5})), path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]
