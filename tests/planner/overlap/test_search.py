"""Overlapped plans of a session: no slower than serial ones, bounded from below, written, read and verified."""

from __future__ import annotations

import pytest
from support.steps.planned_steps import plan_of, step_reference
from support.tiers import fuzz, slow

from planner.common.plan_error import PlanError
from planner.machine.cluster import load_cluster
from planner.overlap.best import fastest
from planner.overlap.buckets import BucketRule
from planner.overlap.fastest_plan import FastestPlan
from planner.overlap.serial import SerialSchedule
from planner.overlap.timetable import Room, overlapped
from planner.plan.document import load_plan, save_plan, schedule_of, verify_plan
from planner.schedule.instructions import Wait, buckets
from planner.scheduling.builder import build_schedule
from planner.session import PlanningSession, PlanRequest
from planner.strategies.random_decision import random_decision

SLOW_LINKS = load_cluster("a100-8-nvlink").model_copy(
    update={"intra_node": load_cluster("a100-8-nvlink").intra_node.model_copy(update={"bandwidth": 2e9})}
)
SECONDS = 4.0
SHARES = {"gpt2": 0.7, "llama": 0.8}
"""Of the peak without a limit, by model; the workspace of attention in 32 bits is more of a Llama's."""

CASES = [("gpt2", (2,), "kiwi_chain"), pytest.param(("llama", (2, 2), "sharding"), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=CASES, ids=str)
def planned(request):
    name, mesh, formulation = request.param
    session = PlanningSession(step_reference(name), SLOW_LINKS, mesh)
    free = session.plan(PlanRequest(formulation=formulation, time_limit=2.0))
    memory = session.budget(None).reserve_bytes + int(SHARES[name] * free.decision.predicted.peak_bytes)
    seen, consider = [], FastestPlan.consider

    def noted(plans, decision):
        seen.append(decision)
        return consider(plans, decision)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastestPlan, "consider", noted)
        beside = session.plan(PlanRequest(memory, formulation, time_limit=SECONDS, overlap=True))
    return session, seen[0], beside


def test_overlap_is_no_slower_and_above_its_bound(planned):
    """The search begins with a plan that does not overlap."""
    session, serial, beside = planned
    alone = session.replay(build_schedule(session.space, serial)).total_quanta
    assert beside.decision.predicted.objective_ns <= alone
    # On a busy machine a round may end without a bound, as any time limit may.
    assert (beside.decision.predicted.bound_ns or 0) <= beside.decision.predicted.objective_ns
    assert (beside.decision.predicted.bound_ns is None) == (beside.record.certificate.proof is None)


@pytest.mark.parametrize("seeds", [range(2), slow(range(2, 5)), fuzz(range(5, 20))], ids=["few", "more", "many"])
def test_no_plan_is_faster_than_the_bound(planned, seeds):
    session, _, beside = planned
    bound = beside.decision.predicted.bound_ns or 0
    limit = beside.decision.options.memory_bytes - beside.decision.options.reserve_bytes
    for seed in seeds:
        serial = build_schedule(session.space, random_decision(session.space, seed))
        _, report = fastest(session.graph, serial, session.instruction_costs, limit, session.replay)
        assert report.peak_bytes > limit or bound <= report.total_quanta


def test_an_overlapped_plan_is_verified(planned):
    session, _, beside = planned
    verify_plan(beside, session.graph, session.fingerprints)
    report = session.replay(schedule_of(beside, session.graph))
    assert report.total_quanta == beside.decision.predicted.objective_ns
    noted = any("beside the computation" in note for note in beside.record.notes)
    assert noted == bool(report.overlapped_quanta)


@pytest.mark.parametrize("span", [0.0, 1.0])
def test_an_overlapped_schedule_is_written_and_read(planned, span, tmp_path):
    session, _, _ = planned
    serial = build_schedule(session.space, random_decision(session.space, 0))
    room = Room(session.replay(serial).profile.total_during, None)
    schedule = overlapped(SerialSchedule(session.graph, serial, session.instruction_costs), room, rule=BucketRule(span))
    assert bool(buckets(schedule.instructions)) == bool(span)
    assert any(isinstance(entry, Wait) for entry in schedule.instructions)
    name = "gpt2" if len(session.mesh) == 1 else "llama"
    save_plan(plan_of(name, schedule, session.instruction_costs), tmp_path / "plan.json")
    assert schedule_of(load_plan(tmp_path / "plan.json"), session.graph) == schedule


@pytest.mark.slow
def test_ctrl_c_while_plans_are_timed_keeps_the_best(planned, monkeypatch):
    session, _, beside = planned

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(FastestPlan, "mix", interrupted)
    monkeypatch.setattr(FastestPlan, "exchange", interrupted)
    options = beside.decision.options
    plan = session.plan(PlanRequest(options.memory_bytes, options.formulation, time_limit=5.0, overlap=True))
    verify_plan(plan, session.graph, session.fingerprints)
    assert any(note.startswith("interrupted:") for note in plan.record.notes)


def test_memory_is_kept(planned):
    _, _, beside = planned
    options = beside.decision.options
    assert beside.decision.predicted.peak_bytes <= options.memory_bytes - options.reserve_bytes


def test_what_cannot_overlap_is_refused():
    with pytest.raises(PlanError, match="kiwi_offload does not overlap collectives yet"):
        PlanRequest(formulation="kiwi_offload", overlap=True)
