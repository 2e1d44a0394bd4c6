"""Pages about plans: complete, made of the plan's own numbers, safe to open, and usable in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from support.steps.opened_plans import KINDS, opened_plan

from planner.common.units import axis_unit, format_bytes
from planner.layers.plan.document import load_layer_plan
from planner.layers.plan.rendering import layer_runs
from planner.view import page as module_of_page
from planner.view.modules import module_tree
from planner.view.page import ASSETS, SCRIPTS, page

LAYER_PLAN = Path(__file__).parents[2] / "fixtures" / "plans" / "galvatron.json"
HOSTILE = "<script>alert('x')</script>&.json"
LOADS = {"src", "href", "action", "data", "poster", "srcset", "background", "formaction"}
"""Attributes that may load something."""


class Parsed(HTMLParser):
    """Elements with their attributes, and the texts of scripts and of all else."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "link", "img"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    @property
    def data(self):
        return json.loads(self.scripts[1])


def bound(plan):
    """The plan with a bound and a limit."""
    predicted = plan.plan.decision.predicted
    options = plan.plan.decision.options.model_copy(update={"memory_bytes": predicted.peak_bytes + 1000})
    predicted = predicted.model_copy(update={"bound_ns": predicted.objective_ns - 1})
    decision = plan.plan.decision.model_copy(update={"predicted": predicted, "options": options})
    return replace(plan, plan=plan.plan.model_copy(update={"decision": decision}))


def parsed(*plans) -> Parsed:
    text = page(plans)
    assert len(text.encode()) < 6_000_000
    found = Parsed(text)
    assert found.open == [], "every element is closed"
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_has_the_numbers_of_its_plan(kind):
    opened = bound(opened_plan(kind))
    found = parsed(opened)
    for name, value in opened.plan.rows():
        assert name in found.words
        assert value in found.words
    (charts,) = found.data["charts"]
    memory = opened.plan.decision.predicted.memory
    drawn = {trace["name"]: trace for trace in charts["step"]["data"] if trace["type"] == "scatter"}
    assert len(drawn) == len(memory.bytes)
    heights = sum(values(trace["y"]) for trace in drawn.values())
    _, size = axis_unit(opened.plan.peak_bytes)
    assert heights.max() * size == pytest.approx(opened.plan.peak_bytes)
    limit = opened.plan.decision.options.limit_bytes / size
    assert any(shape.get("y0") == pytest.approx(limit) for shape in charts["step"]["layout"]["shapes"])
    spent = sum(values(trace["x"]).sum() for trace in charts["kinds"]["data"])
    assert spent == pytest.approx(opened.plan.decision.predicted.objective_ns / 1e6)
    for tensor in opened.report.alive_at_peak:
        assert " ".join(tensor.name.split()) in found.words


def values(encoded) -> np.ndarray:
    """Numbers of a trace, which plotly writes as a list or in base 64."""
    if isinstance(encoded, list):
        return np.array(encoded, dtype=float)
    import base64

    return np.frombuffer(base64.b64decode(encoded["bdata"]), dtype=encoded["dtype"]).astype(float)


def test_every_chart_has_labelled_axes_with_units():
    (charts,) = parsed(opened_plan("serial")).data["charts"]
    titles = [
        axis["title"]["text"] for chart in charts.values() for axis in chart["layout"].values() if has_title(axis)
    ]
    assert sorted(titles) == ["one device (KiB)", "time of a step (ms)", "time of the step (ms)"]


def has_title(axis) -> bool:
    return isinstance(axis, dict) and "title" in axis


def test_modules_unfold_to_every_instruction_that_takes_time():
    opened = opened_plan("serial")
    found = parsed(opened)
    (listed,) = found.data["instructions"]
    paths = {attributes["data-path"] for tag, attributes in found.elements if "data-path" in attributes}
    assert paths == {module.path for module in module_tree(opened).walk()}
    rows = [row for of_module in listed["rows"].values() for row in of_module]
    assert listed["rows"].keys() <= paths
    assert sum(row[4] for row in rows) == opened.plan.decision.predicted.objective_ns
    again = sum(listed["texts"][row[1]].startswith("recompute ") for row in rows)
    assert again == opened.report.recomputed > 0


def test_two_plans_have_the_same_axes_and_a_table_of_differences():
    left, right = opened_plan("serial"), opened_plan("serial", seed=2)
    found = parsed(left, right)
    one, other = found.data["charts"]
    for chart in ("step", "kinds"):
        ranges = [
            {name: axis.get("range") for name, axis in figure[chart]["layout"].items() if "axis" in name}
            for figure in (one, other)
        ]
        assert ranges[0] == ranges[1]
        assert [trace["name"] for trace in one[chart]["data"]] == [trace["name"] for trace in other[chart]["data"]]
    assert "What differs, module by module" in found.words
    assert "Nothing: every module" in parsed(left, left).words


def test_nothing_is_loaded():
    found = parsed(opened_plan("serial"))
    policy = next(a["content"] for tag, a in found.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    loaded = [a[name] for _, a in found.elements for name in a.keys() & LOADS]
    assert all(target.startswith("#") for target in loaded), loaded
    assert not any(tag in ("link", "iframe", "img", "object", "embed") for tag, _ in found.elements)
    assert not re.search(r"@import|url\(", (ASSETS / "page.css").read_text())


def test_names_are_text():
    opened = replace(opened_plan("serial"), name=HOSTILE)
    changed = opened.plan.record.model_copy(update={"notes": ("</script><img src=x>",)})
    opened = replace(opened, plan=opened.plan.model_copy(update={"record": changed}))
    found = parsed(opened, opened)
    assert [tag for tag, _ in found.elements].count("script") == 2 + len(SCRIPTS)
    assert not any(tag == "img" for tag, _ in found.elements)
    assert HOSTILE in found.words
    assert "</script><img src=x>" in found.words


def test_plans_of_layers_have_a_headline_their_memory_and_their_settings():
    layers = load_layer_plan(LAYER_PLAN)
    found = parsed(("galvatron.json", layers))
    for line in layers.summary().splitlines():
        assert " ".join(line.split()) in found.words
    for stage in layers.stages:
        for names, settings in layer_runs(stage):
            assert f"{names} {settings}" in found.words
    assert len(found.scripts) == 3
    (charts,) = found.data["charts"]
    (peak,) = layers.record.engine_peaks
    unit, size = axis_unit(peak.nbytes)
    drawn = {trace["name"]: values(trace["x"]).sum() * size for trace in charts["stages"]["data"]}
    assert drawn.pop("by the formulation") == pytest.approx(layers.record.stage_peak_bytes[0])
    assert drawn == {purpose: pytest.approx(nbytes) for purpose, nbytes in peak.parts.items() if nbytes}
    assert f"({unit})" in charts["stages"]["layout"]["xaxis"]["title"]["text"]
    beside = parsed(opened_plan("serial"), ("galvatron.json", layers))
    assert [list(charts) for charts in beside.data["charts"]] == [["step", "kinds"], ["stages"]]


def test_two_plans_of_layers_have_the_same_axes_and_their_own_limits():
    layers = load_layer_plan(LAYER_PLAN)
    record = layers.record
    near = record.model_copy(update={"tensor_bytes": record.engine_peaks[0].nbytes + 1000})
    tight = layers.model_copy(update={"record": near})
    found = parsed(("galvatron.json", layers), ("tight.json", tight))
    one, other = (charts["stages"]["layout"] for charts in found.data["charts"])
    for axis in ("xaxis", "yaxis"):
        assert one[axis]["range"] == other[axis]["range"]
    assert "shapes" not in one, "a limit far above the bars is in the caption alone"
    (line,) = other["shapes"]
    assert line["x0"] == pytest.approx(near.tensor_bytes / axis_unit(near.tensor_bytes)[1])
    assert line["x0"] < other["xaxis"]["range"][1]
    assert line["name"] == f"limit {format_bytes(near.tensor_bytes)}"


def test_a_plan_of_layers_without_predictions_has_its_settings():
    layers = load_layer_plan(LAYER_PLAN).model_copy(update={"record": None})
    found = parsed(("mine.json", layers))
    assert found.data["charts"] == [{}]
    assert "A plan without predictions." in found.words
    assert layers.stages[0].layers[0].name in found.words


def test_a_missing_library_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(module_of_page, "find_spec", lambda name: None if name == "plotly" else name)
    with pytest.raises(module_of_page.ViewError, match=r"plotly not installed: pip install 'meshwright\[view\]'"):
        page([opened_plan("serial")])
