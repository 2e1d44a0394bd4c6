"""``meshwright view`` as users call it."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest
from support.steps.opened_plans import opened_plan

from planner.plan.decision import decision_digest
from planner.plan.document import save_plan

LAYER_PLAN = Path(__file__).parents[2] / "fixtures" / "plans" / "galvatron.json"


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory) -> Path:
    made = opened_plan("serial")
    decision = made.plan.decision.model_copy(update={"fingerprints": made.session.fingerprints})
    path = tmp_path_factory.mktemp("view") / "plan.json"
    save_plan(made.plan.model_copy(update={"decision": decision, "digest": decision_digest(decision)}), path)
    return path


def test_one_plan(meshwright, plan_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    outcome = meshwright("view", plan_file)
    assert (outcome.code, outcome.out) == (0, "wrote plan.html\n")
    assert opened == [(tmp_path / "plan.html").as_uri()]
    assert "Memory and streams over a step" in (tmp_path / "plan.html").read_text()


def test_two_plans_and_a_plan_of_layers(meshwright, plan_file, tmp_path):
    page = tmp_path / "both.html"
    assert meshwright("view", plan_file, plan_file, "--no-open", "--out", page).code == 0
    assert "What differs" in page.read_text()
    assert meshwright("view", LAYER_PLAN, "--no-open", "--out", page).code == 0
    assert "Plans of whole layers" in page.read_text()


def test_files_for_other_tools(meshwright, plan_file, tmp_path):
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps([{"ph": "X", "name": "step", "pid": 1, "tid": 1, "ts": 5, "dur": 1}]))
    trace, memory = tmp_path / "trace.json", tmp_path / "memory.pickle"
    options = ("--trace", trace, "--measured", measured, "--memory-snapshot", memory)
    outcome = meshwright("view", plan_file, "--no-open", "--out", tmp_path / "page.html", *options)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines() == [f"wrote {path}" for path in (trace, memory, tmp_path / "page.html")]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}
    assert memory.read_bytes().startswith(b"\x80\x04")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.json",), "there is no file 'missing.json'"),
        (("PLAN", "PLAN", "PLAN"), "3 plans are given"),
        (("PLAN", "--out", "missing/page.html"), "'missing' does not exist"),
        (("PLAN", "PLAN", "--trace", "trace.json"), "--trace: it is about one plan"),
        (("PLAN", "--measured", "PLAN"), "give --trace as well"),
        (("PLAN", "--trace", "trace.json", "--measured", "PLAN"), "no list traceEvents"),
        (("LAYERS", "--memory-snapshot", "memory.pickle"), "is a plan of layers"),
        (("PLAN", "--cluster", "h100-8-nvlink"), "the plan was made for something else"),
    ],
)
def test_bad_input_ends_with_one_line_and_no_file(meshwright, plan_file, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    files = {"PLAN": plan_file, "LAYERS": LAYER_PLAN}
    outcome = meshwright("view", *(files.get(word, word) for word in arguments), "--no-open")
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
