"""Ctrl-C during a search: one press ends the command, and what was found until then is kept."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.steps.planned_steps import configuration_file, step_reference

from formulations.problem.solution import Progress
from planner.benchmarks import real_steps
from planner.benchmarks.real_steps import RealStep, load_known
from planner.models import families
from planner.models.references import ModelReference
from planner.plan.check import verify_plan
from planner.plan.document import Plan, load_plan
from planner.plan.notes import INTERRUPTED
from planner.session import PlanningSession, PlanRequest
from runtime.commands.tables.progress import ProgressLine

STEPS = tuple(RealStep("mlp", (2,), "kiwi_chain", share) for share in (70, 65, 60))


@pytest.fixture
def press(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[ProgressLine], bool]], list[str]]]:
    """Presses Ctrl-C once, at the first report of a search for which the condition holds of the progress line."""
    pressed: list[str] = []

    def arrange(when: Callable[[ProgressLine], bool]) -> list[str]:
        def report(line: ProgressLine, progress: Progress) -> None:
            line.latest = progress
            if not pressed and when(line):
                pressed.append(line.what)
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(ProgressLine, "__call__", report)
        return pressed

    yield arrange
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_a_plan_is_the_best_until_then(meshwright, press, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    step = [f"hf:{configuration_file('gpt2')}", "--cluster", "a100-8-nvlink", "--seq", "16", "--batch", "4"]
    step += ["--dropout", "0", "--mesh", "2", "--tensor-memory", "700KiB"]
    pressed = press(lambda line: line.latest.source != "initial choices" and line.latest.incumbent is not None)
    outcome = meshwright("plan", *step, "--time-limit", "60", "--out", path)
    assert len(pressed) == 1
    assert outcome.code == 0, outcome.err
    plan = load_plan(path)
    assert plan.record.notes[0] == INTERRUPTED
    assert INTERRUPTED in outcome.out
    session = PlanningSession(ModelReference(step[0], batch=4, sequence=16, dropout=0.0), "a100-8-nvlink", (2,))
    costs, allowed = session.instruction_costs, session.allowed_strategies
    verify_plan(plan, session.graph, session.fingerprints, seconds=costs, allowed=allowed)


@pytest.mark.parametrize(("at", "kept"), [("looking", 0), ("solving", 1)])
def test_an_export_keeps_what_is_known(
    meshwright, press, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: str, kept: int
) -> None:
    monkeypatch.setattr(real_steps, "MODELS", {"mlp": step_reference("mlp")})
    monkeypatch.setattr(real_steps, "STEPS", STEPS)
    out = tmp_path / "set"
    pressed = press(lambda line: at in line.what and line.latest.incumbent is not None)
    outcome = meshwright("bench", "export", "--out", out, "--time-limit", "60")
    assert len(pressed) == 1
    assert outcome.code == 130, outcome.err
    *begun, told = outcome.err.splitlines()
    assert told == f"meshwright: interrupted; {kept} instances are known, the same command goes on"
    assert begun[-1] == pressed[0], "nothing else begins"
    known = load_known(out / "known.json")
    assert [facts.best is not None for facts in known.values()] == [True] * kept


def test_the_families_keep_their_rows(meshwright, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(families, "FAMILIES", {"decoder": {"gpt2": {}, "opt": {}, "llama": {}}})
    true_plan, planned = PlanningSession.plan, []

    def plan(session: PlanningSession, request: PlanRequest) -> Plan:
        planned.append(session)
        return true_plan(session, request, interrupt if len(planned) == 2 else None)

    def interrupt(_: Progress) -> None:
        if len(planned) == 2:
            planned.append(None)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PlanningSession, "plan", plan)
    page = tmp_path / "families.md"
    outcome = meshwright("doctor", "--families", "--out", page, "--json", "-")
    assert outcome.code == 130, outcome.err
    assert len(planned) == 3, "the third family does not begin"
    assert outcome.err.splitlines()[-1] == "meshwright: interrupted after 1 of 3 families"
    assert re.search(r"^gpt2: planned, \d+ operators, ", outcome.err, re.MULTILINE)
    assert [row["family"] for row in json.loads(outcome.out)] == ["gpt2"]
    assert "| opt |" not in page.read_text()
    assert "| gpt2 | planned |" in page.read_text()
