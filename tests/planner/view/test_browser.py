"""Pages in a browser: drawn without errors, with what the operator graph has, and usable by keyboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.steps.opened_plans import opened_plan

from planner.graph.operator_graph import ValueRole, module_prefix
from planner.layers.plan.document import load_layer_plan
from planner.view.page import page

LAYER_PLAN = Path(__file__).parents[2] / "fixtures" / "plans" / "galvatron.json"

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
  const graphs = [...document.querySelectorAll(".graph")];
  const drawn = async () => { await new Promise(done => setTimeout(done, 50));
    const name = node => node.at < 0 ? null : node.drawn.dataset.path;
    return graphs.map(graph => graph.edges.map(edge => [name(edge.from), name(edge.to)])); };
  const choose = (list, value) => { list.value = value; list.dispatchEvent(new Event("change")); };
  const type = async key => {
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
    await drawn(); };
  const at = () => [document.activeElement.dataset.path, document.activeElement.getAttribute("aria-expanded")];
  result.edges = {};
  for (const value of [1, 2, 3, 4]) {
    choose(depth, value);
    for (const name of [0, 2]) { choose(part, name); result.edges[`${value} ${name}`] = await drawn(); }
  }
  choose(part, 0); choose(depth, 3); await drawn();
  result.marked = graphs.map(graph => graph.querySelectorAll(".edge.resharded").length);
  const boxes = graphs.flatMap(graph => [".box", ".words"].map(kind =>
    [...graph.querySelectorAll(kind)].map(each => each.getBoundingClientRect())));
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const buttons = charts.flatMap(chart => [...chart.querySelectorAll(".modebar-btn")].map(each =>
    [each.getBoundingClientRect(), chart]));
  const covers = ([box, chart]) => [...chart.querySelectorAll(".legend, .plot")].some(
    part => meet(box, part.getBoundingClientRect()));
  result.buttons = [buttons.length, buttons.filter(covers).length];
  result.overlaps = boxes.map(some =>
    some.filter((box, at) => some.some((other, before) => before < at && meet(box, other))).length);
  graphs[0].querySelector('.node[data-path="transformer.h.0"]').focus();
  result.keys = [at()];
  for (const key of ["ArrowDown", "ArrowRight", "ArrowLeft"]) { await type(key); result.keys.push(at()); }
  await type("Enter"); result.keys.push(at());
  await type("Enter"); result.row = document.activeElement.closest("details").dataset.path;
  result.drawn = document.querySelectorAll(".chart svg .barlayer path, .chart svg .fills path").length;
  result.loaded = performance.getEntriesByType("resource").map(entry => entry.name);
  result.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  result.wrong = wrong;
  document.title = JSON.stringify(result);
})().catch(error => document.title = JSON.stringify({wrong: [error.message]}));</script></body>"""


def shown(file, width):
    """What the script at the end of a page writes into its title."""
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=15000",
        f"--window-size={width},900",
    ]
    command = [BROWSER, *options, f"--user-data-dir={file.parent / 'profile'}", "--dump-dom", file.as_uri()]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", finished.stdout, re.DOTALL)
    assert title is not None, finished.stderr
    return json.loads(title[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))


def folded_edges(opened, depth, phase):
    """Edges between modules of the operator graph folded at a depth, without those of a phase to the other.

    A parameter that another module than its own reads, as a tied one, is an edge of the page alone.
    """
    graph = opened.graph.to_networkx(depth)
    path = {node: figures["module_path"].replace("(root)", "") for node, figures in graph.nodes.items()}
    of_phase = {node for node, figures in graph.nodes.items() if figures["phase"] == phase}
    made = {(path[one], path[other]) for one, other in graph.edges() if {one, other} <= of_phase}
    read = {
        (module_prefix(value.name.rpartition(".")[0], depth), module_prefix(operator.module_path, depth))
        for operator in opened.graph.operators
        if operator.phase == phase
        for value in (opened.graph.values[index] for index in operator.inputs)
        if value.role in (ValueRole.PARAMETER, ValueRole.BUFFER)
    }
    named = {tuple(module.replace("(root)", "") for module in edge) for edge in read}
    return made | {(one, other) for one, other in named if one != other}


@pytest.mark.fast_cases("1600")
@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
@pytest.mark.parametrize("width", [400, 900, 1600])
def test_a_browser_draws_it_and_keys_work(tmp_path, width):
    file = tmp_path / "page.html"
    plans = [opened_plan("serial"), opened_plan("overlapped")]
    text = page(plans)
    file.write_text(text.replace("<head>", "<head>" + FIRST, 1).replace("</body>", LAST))
    found = shown(file, width)
    assert found["wrong"] == []
    assert found["loaded"] == []
    assert found["wide"] <= 0, "the page needs no scrolling to the side"
    assert found["drawn"] > 50
    assert found["buttons"][0] > 0
    assert found["buttons"][1] == 0, "buttons lie on a legend or on a plot"
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
    for at, plan in enumerate(plans):
        for chosen, drawn in found["edges"].items():
            depth, part = map(int, chosen.split())
            assert {(one, other) for one, other in drawn[at] if one is not None and one != other} == folded_edges(
                plan, depth, "backward" if part else "forward"
            )
    assert min(found["marked"]) > 0
    assert found["overlaps"] == [0, 0, 0, 0], "neither nodes nor words of a graph lie on one another"
    one, other = "transformer.h.0", "transformer.h.1"
    assert found["keys"] == [[one, "false"], [other, "false"], [other, None], [other, "false"], [other, None]]
    assert found["row"] == other
    assert found["hits"] > 0
    assert found["left"] == 0


LAST_OF_LAYERS = """<script>(async () => {
  const ranges = () => charts.map(chart => chart._fullLayout.xaxis.range.map(Number));
  const result = {whole: ranges()};
  charts[0].dispatchEvent(new KeyboardEvent("keydown", {key: "+"}));
  await new Promise(done => setTimeout(done, 300));
  result.zoomed = ranges();
  result.bars = charts.map(chart => chart.querySelectorAll(".barlayer path").length);
  result.loaded = performance.getEntriesByType("resource").map(entry => entry.name);
  result.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  result.wrong = wrong;
  document.title = JSON.stringify(result);
})().catch(error => document.title = JSON.stringify({wrong: [error.message]}));</script></body>"""


@pytest.mark.fast_cases("1600")
@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
@pytest.mark.parametrize("width", [400, 900, 1600])
def test_a_browser_draws_the_stages_of_plans_of_layers(tmp_path, width):
    layers = load_layer_plan(LAYER_PLAN)
    file = tmp_path / "page.html"
    text = page([("one.json", layers), ("other.json", layers)])
    file.write_text(text.replace("<head>", "<head>" + FIRST, 1).replace("</body>", LAST_OF_LAYERS))
    found = shown(file, width)
    assert found["wrong"] == []
    assert found["loaded"] == []
    assert found["wide"] <= 0
    parts = [nbytes for peak in layers.record.engine_peaks for nbytes in peak.parts.values() if nbytes]
    assert found["bars"] == [len(parts)] * 2
    (start, end), other = found["whole"]
    assert [start, end] == other
    for zoomed in found["zoomed"]:
        assert zoomed[1] - zoomed[0] == pytest.approx((end - start) / 2)
