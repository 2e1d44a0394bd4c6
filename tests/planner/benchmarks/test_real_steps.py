"""The public benchmark set: export, then import, gives the same objective and the same plan."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.steps.planned_steps import step_reference
from support.tiers import fuzz, slow

from formulations.instances.contest import read_contest_problem
from formulations.instances.contest_form import contest_form, write_contest_problem
from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions, Status
from formulations.solvers import SolverPool, solve
from planner.benchmarks import contest_suite, load_best_known, real_steps
from planner.benchmarks.real_steps import PUBLISHED, RealStep, export_steps, free_peak, known_table, load_known
from planner.benchmarks.suites import SuiteError
from planner.session import PlanningSession, PlanRequest

STEPS = (RealStep("mlp", (2,), "sharding", 90), RealStep("mlp", (2,), "kiwi_chain", 70))


@pytest.fixture
def small_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_steps, "MODELS", {"mlp": step_reference("mlp")})
    monkeypatch.setattr(real_steps, "STEPS", STEPS)


def test_export_then_import_gives_the_same_objective_and_plan(small_set: None, tmp_path: Path) -> None:
    begun: list[str] = []
    known = export_steps(tmp_path, None, 200.0, ("json", "lp", "mps"), begun.append)
    assert [what for what in begun if "tracing" in what] == ["mlp-2-sharding-90: tracing"]
    assert sorted(path.name for path in (tmp_path / "problems").iterdir()) == [
        f"{step.name}.{suffix}" for step in reversed(STEPS) for suffix in ("json.gz", "lp", "mps")
    ]
    session = PlanningSession(step_reference("mlp"), real_steps.CLUSTER, (2,))
    with SolverPool() as pool:
        peak = free_peak(session, pool)
        for step in STEPS:
            facts = known[step.name]
            assert facts.best is not None
            assert (facts.best, facts.proof) == (facts.bound, "exact")
            assert facts.limit == peak * step.share // 100
            request = PlanRequest(
                memory=facts.limit + session.cluster.device.reserve_bytes, formulation=step.formulation
            )
            plan, built = session.plan(request), session.problem(request)
            assert plan.objective_seconds == pytest.approx(facts.best * 1e-9, rel=1e-12)
            imported = read_contest_problem(tmp_path / "problems" / f"{step.name}.json.gz")
            form = contest_form(built.problem)
            found = solve(imported, "branch_and_bound", SolveOptions(time_limit=200), pool=pool)
            assert (found.status, found.objective) == (Status.OPTIMAL, facts.best)
            assert found.choices is not None
            assert session.execute(built.decode(form.restrict(found.choices))).cost == facts.best
            chosen = solve(built.problem, "branch_and_bound", SolveOptions(time_limit=200), pool=pool)
            assert chosen.choices is not None
            whole = form.extend(chosen.choices)
            assert check(imported, whole).objective == chosen.objective == facts.best
            decision = built.decode(form.restrict(whole))
            assert decision == built.decode(chosen.choices)
            assert session.schedule(decision) == session.schedule(built.decode(chosen.choices))
    suite = contest_suite([tmp_path / "problems"])
    assert {instance.name for instance in suite.instances} == load_best_known(tmp_path / "best_known.json").keys()
    assert known_table(known) in (tmp_path / "README.md").read_text()


def test_an_export_goes_on_and_keeps_only_what_belongs_to_the_same_file(small_set: None, tmp_path: Path) -> None:
    first = export_steps(tmp_path, ["mlp-2-sharding"], 0.0)
    (name,) = first
    content = json.loads((tmp_path / "known.json").read_text())
    content[name] |= {"best": 7, "bound": 7, "proof": "exact", "solver": "mine"}
    (tmp_path / "known.json").write_text(json.dumps(content))
    before = gzip.decompress((tmp_path / "problems" / f"{name}.json.gz").read_bytes())
    assert export_steps(tmp_path, [name], 0.0)[name].best == 7
    assert gzip.decompress((tmp_path / "problems" / f"{name}.json.gz").read_bytes()) == before
    content[name]["sha256"] = "another"
    (tmp_path / "known.json").write_text(json.dumps(content))
    assert export_steps(tmp_path, [name], 0.0)[name].best is None
    with pytest.raises(SuiteError, match="no instance begins with 'gpt9'; models are mlp"):
        export_steps(tmp_path, ["gpt9"])
    (tmp_path / "known.json").write_text('{"a": 1}')
    with pytest.raises(SuiteError, match="remove it"):
        load_known(tmp_path / "known.json")


def test_all_of_the_public_set_is_known() -> None:
    known = load_known(PUBLISHED)
    assert list(known) == sorted(step.name for step in real_steps.STEPS)
    for facts in known.values():
        assert facts.best is not None
        assert facts.bound is not None
        assert 0 <= facts.best - facts.bound <= 0.002 * facts.best
        assert facts.proof == "exact"
    assert known_table(known) in PUBLISHED.with_name("RESULTS.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def published() -> tuple[PlanningSession, Mapping[str, RealStep]]:
    """GPT-2 on four ranks, and the steps of it by formulation."""
    steps = [step for step in real_steps.STEPS if (step.model, step.mesh) == ("gpt2", (2, 2))]
    session = PlanningSession(real_steps.MODELS["gpt2"], real_steps.CLUSTER, (2, 2))
    return session, {step.formulation: step for step in steps}


@pytest.mark.parametrize(
    "formulation",
    [slow(name) if name == "sharding" else fuzz(name) for name in real_steps.FORMULATIONS],
)
def test_assignments_of_a_published_model_go_through_its_files_and_back(
    formulation: str, published: tuple[PlanningSession, Mapping[str, RealStep]], pool: SolverPool, tmp_path: Path
) -> None:
    """GPT-2 on four ranks, as published: what is found first is the same plan by the file and by the step."""
    session, steps = published
    step, known = steps[formulation], load_known(PUBLISHED)
    limit = known[step.name].limit + session.cluster.device.reserve_bytes
    built = session.problem(PlanRequest(memory=limit, formulation=step.formulation))
    form = contest_form(built.problem)
    file = tmp_path / f"{step.name}.json.gz"
    write_contest_problem(file, form.problem)
    imported = read_contest_problem(file)
    found = solve(imported, "lagrangian", SolveOptions(time_limit=10.0, relative_gap=0.5), pool=pool)
    assert found.choices is not None, step.name
    assert found.objective is not None
    choices = form.restrict(found.choices)
    assert check(built.problem, choices).objective == found.objective + form.offset
    again = form.extend(choices)
    assert check(imported, again).objective == found.objective
    decision, back = built.decode(choices), built.decode(form.restrict(again))
    assert decision == back
    schedule = session.schedule(decision)
    assert schedule == session.schedule(back)
    assert session.replay(schedule, known[step.name].limit).ok
    assert session.execute(decision).cost == found.objective + form.offset
