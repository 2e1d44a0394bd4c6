"""KIWI's own programs on traced steps: what they decide runs within the limit, and too large steps are refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.problems.kiwi_graphs import random_graph

from formulations.kiwi import of_step
from formulations.kiwi.graph import GraphError
from formulations.kiwi.of_step import (
    MEMORY_MODELS,
    MOST_OPERATORS,
    PROGRAMS,
    kiwi_graph,
    solve_program,
    step_decision,
)
from formulations.kiwi.schedule import StagedDecision, in_order, replay, tidy, with_recomputed
from formulations.kiwi.solve import solve_kiwi
from formulations.kiwi.training_step import step_model
from formulations.problem.solution import Status
from formulations.step.kiwi_reduced import reduced_moments
from formulations.step.replay import BrokenDecisionError
from formulations.step.solving.context import Executed, SolveContext
from formulations.step.training_step import StepDecision
from planner import api
from planner.common.plan_error import PlanError
from planner.models.references import ModelReference
from planner.session import PUBLISHED, PlanningSession, PlanRequest

SECONDS = 60.0


@pytest.fixture(scope="module")
def session() -> PlanningSession:
    return PlanningSession(ModelReference("support.steps.models:mlp"), "titan-rtx-8-pcie", (2,))


@pytest.mark.slow
def test_what_the_programs_decide_fits_and_costs_what_they_say(session, pool) -> None:
    reserve = session.cluster.device.reserve_bytes
    free = session.solve(PlanRequest(formulation="sharding", time_limit=SECONDS), pool=pool)
    memory = session.execute(free.decision).peak * 9 // 10
    request = PlanRequest(memory + reserve, time_limit=SECONDS)
    reduced = session.solve(PlanRequest(memory + reserve, "kiwi_reduced", time_limit=SECONDS), pool=pool).result
    for name in PROGRAMS:
        solved = session.solve(PlanRequest(request.memory, name, time_limit=SECONDS), pool=pool)
        executed = session.execute(solved.decision)
        assert executed.peak <= memory
        assert executed.cost == solved.result.objective
        assert solved.result.bound <= reduced.objective
        graph = kiwi_graph(session.space.model)
        kept = StagedDecision(solved.decision.layouts, in_order(graph))
        assert replay(graph, kept).cost == session.execute(StepDecision(solved.decision.layouts, {})).cost


def test_the_engines_count_is_never_less_than_what_is_held(session) -> None:
    """The paper's is for most decisions."""
    rng, model = random.Random(0), session.space.model
    graphs = {name: kiwi_graph(model, name) for name in MEMORY_MODELS}
    less = 0
    for _ in range(60):
        layouts = tuple(rng.randrange(node.size) for node in model.nodes)
        again = [i for i in graphs["paper"].candidates if rng.random() < 0.3]
        decision = StagedDecision(layouts, tidy(graphs["paper"], with_recomputed(graphs["paper"], again)))
        try:
            held = session.execute(step_decision(graphs["paper"], decision)).peak
        except BrokenDecisionError:
            continue
        counted = {name: replay(graph, decision).peak for name, graph in graphs.items()}
        assert counted["engine"] >= held
        less += counted["paper"] < held
    assert less > 20


@pytest.mark.slow
def test_the_papers_count_is_solved_again_where_copies_bind(pool, monkeypatch) -> None:
    session = PlanningSession(
        ModelReference("support.steps.models:random_mlp", seed=1, batch=64), "titan-rtx-8-pcie", (2,)
    )
    solved: list[int | None] = []

    def noted(graph, limit, *given):
        solved.append(limit)
        return solve_kiwi(graph, limit, *given)

    monkeypatch.setattr(of_step, "solve_kiwi", noted)
    free = session.solve(PlanRequest(formulation="sharding", time_limit=SECONDS), pool=pool)
    limit = session.execute(free.decision).peak * 92 // 100
    request = PlanRequest(limit + session.cluster.device.reserve_bytes, "kiwi_reduced_published", time_limit=SECONDS)
    found = {}
    for name in MEMORY_MODELS:
        solved.clear()
        found[name] = session.solve(replace(request, memory_model=name), pool=pool)
        assert session.execute(found[name].decision).peak <= limit
        assert solved[0] == limit
        assert (len(solved) == 1) == (name == "engine")
    assert found["paper"].result.bound < found["engine"].result.bound


def test_the_program_runs_the_same_operators_again_as_our_reduced_problem(session) -> None:
    model = session.space.model
    graph = kiwi_graph(model)
    again = {i: (graph.first_backward_use[i],) for i in graph.candidates}
    assert again
    assert again == dict(reduced_moments(model))


@pytest.mark.slow
def test_published_plans_are_plans_of_our_formulation_and_never_cheaper(session, pool) -> None:
    """One problem: the same decisions, the same prices, the same limit on what is held when a plan is executed."""
    reserve = session.cluster.device.reserve_bytes
    free = session.solve(PlanRequest(formulation="sharding", time_limit=SECONDS), pool=pool)
    peak, dearer = session.execute(free.decision).peak, 0
    for share in (95, 80, 75):
        memory = peak * share // 100
        request = PlanRequest(memory + reserve, "kiwi_reduced", time_limit=SECONDS)
        own = session.solve(request, pool=pool).result
        published = session.solve(replace(request, formulation=PUBLISHED["kiwi_reduced"]), pool=pool).decision
        executed, built = session.execute(published), session.problem(request)
        assert built.decode(built.encoded(published)) == published
        assert own.status is Status.OPTIMAL
        assert own.objective <= executed.cost
        assert executed.peak <= memory
        dearer += own.objective > free.result.objective
    assert dearer, "some limit binds"


def test_steps_beyond_the_stated_size_are_refused() -> None:
    model = step_model(random_graph(0, forward=max(MOST_OPERATORS.values()), most_strategies=1))
    for name, most in MOST_OPERATORS.items():
        with pytest.raises(GraphError, match=rf"{name}: the step runs \d+ operators, .* more than {most}; use kiwi_ch"):
            solve_program(model, None, name, SolveContext(lambda _: Executed(0, 0)))


def test_what_has_no_published_form_says_what_has() -> None:
    request = {"cluster": "titan-rtx-8-pcie", "mesh": (2,), "as_published": True}
    with pytest.raises(PlanError, match="kiwi_chain has no published form of its own; it is for kiwi_reduced, kiwi_f"):
        api.plan("hf:gpt2", formulation="kiwi_chain", **request)
    with pytest.raises(PlanError, match="slips printed: kiwi_reduced has none"):
        api.plan("hf:gpt2", formulation="kiwi_reduced", slips="printed", **request)
    for name in ("kiwi_chain", "kiwi_offload"):
        with pytest.raises(PlanError, match=f"memory_model paper: {name} has .* for osdp, kiwi_full, .*: leave it out"):
            api.plan(
                "hf:gpt2", formulation=name, choices={"memory_model": "paper"}, **request | {"as_published": False}
            )
    with pytest.raises(PlanError, match="memory_model osdp: kiwi_full_published knows engine and paper"):
        api.plan("hf:gpt2", formulation="kiwi_full", choices={"memory_model": "osdp"}, **request)
    with pytest.raises(
        PlanError, match="strategies all: kiwi_full_published has no such choice; it is for osdp, galvatron"
    ):
        api.plan("hf:gpt2", formulation="kiwi_full", choices={"strategies": "all"}, **request)
    assert set(PUBLISHED.values()) < set(PROGRAMS)


@pytest.mark.slow
def test_a_plan_says_how_its_program_counted() -> None:
    reference = ModelReference("support.steps.models:random_mlp", seed=4)
    request = {"cluster": "titan-rtx-8-pcie", "mesh": (2,), "time_limit": SECONDS}
    for given, named in ((None, "engine"), ("paper", "paper")):
        plan = api.plan(
            reference, formulation="kiwi_reduced", as_published=True, choices={"memory_model": given}, **request
        )
        assert plan.decision.options.formulation == "kiwi_reduced_published"
        assert plan.decision.options.memory_model == named
        assert ("memory model", named) in plan.rows()
    plain = api.plan(reference, formulation="sharding", **request)
    assert "memory_model" not in plain.model_dump()["decision"]["options"]
