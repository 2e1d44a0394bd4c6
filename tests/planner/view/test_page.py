"""Pages about plans: complete, made of the plan's own numbers, safe to open, and usable in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from support.steps.opened_plans import KINDS, opened_plan

from planner.layers.plan.document import load_layer_plan
from planner.view import page as module_of_page
from planner.view.modules import module_tree
from planner.view.page import ASSETS, page

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
    assert heights.max() * 2**30 == pytest.approx(opened.plan.peak_bytes)
    limit = opened.plan.decision.options.limit_bytes / 2**30
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
    assert sorted(titles) == ["one device (GiB)", "time of a step (ms)", "time of the step (ms)"]


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
    assert [tag for tag, _ in found.elements].count("script") == 3
    assert not any(tag == "img" for tag, _ in found.elements)
    assert HOSTILE in found.words
    assert "</script><img src=x>" in found.words


def test_plans_of_layers_have_a_headline_and_their_settings():
    layers = load_layer_plan(LAYER_PLAN)
    found = parsed(("galvatron.json", layers))
    for line in layers.summary().splitlines():
        assert " ".join(line.split()) in found.words
    assert "A plan of whole layers" in found.words
    assert found.scripts == []
    beside = parsed(("galvatron.json", layers), opened_plan("serial"))
    assert len(beside.data["charts"]) == 1


def test_a_missing_library_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(module_of_page, "find_spec", lambda name: None if name == "plotly" else name)
    with pytest.raises(module_of_page.ViewError, match=r"plotly not installed: pip install 'meshwright\[view\]'"):
        page([opened_plan("serial")])


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FIRST = """<script>const wrong = [];
addEventListener("securitypolicyviolation", event => wrong.push(event.violatedDirective + " " + event.blockedURI));
addEventListener("error", event => wrong.push(event.message));</script>"""
LAST = """<script>(async () => {
  const steps = [...document.querySelectorAll("[data-chart=step]")];
  const ranges = () => steps.map(chart => chart._fullLayout.xaxis.range.map(Number));
  const press = async key => { charts[0].dispatchEvent(new KeyboardEvent("keydown", {key}));
    await new Promise(done => setTimeout(done, 300)); };
  const result = {whole: ranges()};
  await press("+"); result.zoomed = ranges();
  await press("ArrowRight"); result.moved = ranges();
  await press("0"); result.again = ranges();
  const field = document.getElementById("search");
  field.value = "h.1 addmm"; field.dispatchEvent(new Event("input"));
  result.shown = modules.filter(m => !m.hidden).map(m => m.dataset.path);
  field.form.requestSubmit(); result.focus = document.activeElement.textContent;
  document.activeElement.click(); await new Promise(done => setTimeout(done, 100));
  result.hits = document.querySelectorAll("tr.hit").length;
  field.value = ""; field.dispatchEvent(new Event("input"));
  result.left = modules.filter(m => m.hidden).length;
  result.drawn = document.querySelectorAll(".chart svg .barlayer path, .chart svg .fills path").length;
  result.loaded = performance.getEntriesByType("resource").map(entry => entry.name);
  result.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  result.wrong = wrong;
  document.title = JSON.stringify(result);
})();</script></body>"""


@pytest.mark.fast_cases("1600")
@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
@pytest.mark.parametrize("width", [400, 900, 1600])
def test_a_browser_draws_it_and_keys_work(tmp_path, width):
    file = tmp_path / "page.html"
    text = page([opened_plan("serial"), opened_plan("overlapped")])
    file.write_text(text.replace("<head>", "<head>" + FIRST, 1).replace("</body>", LAST))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=8000",
        f"--window-size={width},900",
    ]
    command = [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", finished.stdout, re.DOTALL)
    assert title is not None, finished.stderr
    found = json.loads(title[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert found["wrong"] == []
    assert found["loaded"] == []
    assert found["wide"] <= 0, "the page needs no scrolling to the side"
    assert found["drawn"] > 50
    (start, end), other = found["whole"]
    assert [start, end] == other
    width_of = [each[0][1] - each[0][0] for each in (found["zoomed"], found["moved"], found["again"])]
    assert width_of == pytest.approx([(end - start) / 2, (end - start) / 2, end - start])
    assert found["moved"][0][0] > found["zoomed"][0][0]
    assert found["moved"][0] == pytest.approx(found["moved"][1]), "charts side by side move together"
    assert found["shown"]
    assert all(
        path == "" or "transformer.h.1".startswith(path) or path.startswith("transformer.h.1")
        for path in found["shown"]
    )
    assert "instructions" in found["focus"]
    assert found["hits"] > 0
    assert found["left"] == 0
