"""Costs of a model's instructions: they add up to the step that was measured, and the next plan is priced by them."""

from __future__ import annotations

import numpy as np
import pytest
from support.steps.planned_steps import random_plan, step_reference
from support.tiers import slow

from planner.machine.calibration import CalibrationError, save_cluster
from planner.machine.cluster import LOCAL_NAME, load_cluster, read_cluster
from planner.machine.known_costs import CostSource
from planner.plan.document import schedule_of
from planner.schedule.instructions import Update
from planner.session import PlanningSession, PlanRequest, session_of
from runtime.calibration.calibrate import calibrate
from runtime.measure.run_report import RunReport
from runtime.prediction.model_costs import (
    add_costs_of_run,
    calibrate_model,
    measured_costs,
    unmeasured_seconds,
    with_costs,
)
from runtime.prediction.random_plans import covering_plans, random_plans


def report_of(plan, times, step_seconds, device="cpu"):
    """A report as of a run whose instructions took ``times`` (ranks, instructions) nanoseconds."""
    ranks = len(times)
    return RunReport(
        plan_digest=plan.digest,
        mesh=plan.decision.options.mesh,
        device=device,
        dtype="float32",
        steps=5,
        memory_limit_bytes=None,
        measured_peak_bytes=[0] * ranks,
        measured_host_peak_bytes=[0] * ranks,
        resident_set_bytes=[0] * ranks,
        measured_step_s=step_seconds,
        loss=[0.0] * 5,
        reference_loss=None,
        max_grad_rel_error=None,
        worst_gradient="",
        predicted_peak_bytes=[0] * ranks,
        predicted_host_peak_bytes=[0] * ranks,
        predicted_step_s=plan.objective_seconds,
        predicted_stall_s=0.0,
        max_param_rel_error=None,
        worst_parameter="",
        instruction_ns=[tuple(row) for row in times],
    )


@pytest.mark.parametrize(("name", "seed"), [("mlp", 0), ("gpt2", 1), ("res_net", 2), slow("llama", 3), slow("vit", 4)])
def test_the_costs_of_a_run_add_up_to_its_step(name, seed):
    plan = random_plan(name, (2,), seed)
    session = session_of(plan)
    schedule = schedule_of(plan, session.graph)
    rng = np.random.default_rng(seed)
    times = rng.integers(1, 10**6, size=(2, len(schedule.instructions)))
    step = 1.25e-9 * times.sum(axis=1).max()
    costs = measured_costs(session, schedule, report_of(plan, times.tolist(), step))
    measured = session_of(plan, with_costs(session.cluster, costs))
    assert unmeasured_seconds(measured, schedule) == 0.0
    assert measured.instruction_costs.seconds_by_source(schedule)[CostSource.MEASURED] == pytest.approx(step)
    assert measured.replay(schedule).total_quanta == pytest.approx(step * 1e9, rel=1e-3)


def test_costs_of_a_run_elsewhere_are_kept_with_its_cluster(tmp_path):
    plan, path = random_plan("gpt2", (2,), 1), tmp_path / "rack.json"
    session = session_of(plan)
    save_cluster(session.cluster.model_copy(update={"name": "rack"}), path)
    times = np.full((2, len(schedule_of(plan, session.graph).instructions)), 5000).tolist()
    found = add_costs_of_run(plan, report_of(plan, times, 0.5), path)
    assert found == read_cluster(path)
    assert found.name == "rack"
    schedule = schedule_of(plan, session.graph)
    assert unmeasured_seconds(session_of(plan, found), schedule) == 0.0
    assert session_of(plan, found).replay(schedule).total_quanta == pytest.approx(0.5e9, rel=1e-3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"plan_digest": "0" * 64}, "the report is of plan 000000000000, the plan is"),
        ({"instruction_ns": None}, "no times of instructions: run the plan with --profile"),
        ({"measured_step_s": None}, "no times of instructions: run the plan with --profile, 2 steps or more"),
    ],
)
def test_reports_that_have_no_costs_of_the_plan_are_refused(changed, message, tmp_path):
    plan = random_plan("mlp", (2,), 0)
    report = report_of(plan, [[1], [1]], 0.5).model_copy(update=changed)
    with pytest.raises(CalibrationError, match=message):
        add_costs_of_run(plan, report, tmp_path / "absent.json")


def test_updates_that_one_kernel_makes_share_its_time():
    plan = random_plan("gpt2", (1,), 0)
    session = session_of(plan)
    schedule = schedule_of(plan, session.graph)
    at = [position for position, entry in enumerate(schedule.instructions) if isinstance(entry, Update)]
    times = np.full((1, len(schedule.instructions)), 1000)
    times[:, at] = 0
    times[:, at[-1]] = 10**6
    report = report_of(plan, times.tolist(), 1e-9 * times.sum(), "cuda")
    costs = measured_costs(session, schedule, report)["adamw"].values()
    ratios = [cost.seconds / cost.modelled for cost in costs]
    assert max(ratios) < 1.001 * min(ratios)
    measured = session_of(plan, with_costs(session.cluster, measured_costs(session, schedule, report)))
    assert measured.replay(schedule).total_quanta == pytest.approx(times.sum(), rel=1e-2)


def test_costs_of_several_runs_are_averaged_and_others_stay():
    plan = random_plan("mlp", (2,), 0)
    session = session_of(plan)
    schedule = schedule_of(plan, session.graph)
    first, second = (
        measured_costs(session, schedule, report_of(plan, [[factor] * len(schedule.instructions)] * 2, factor * 1e-3))
        for factor in (1, 2)
    )
    kind = next(iter(first))
    once = with_costs(session.cluster, first)
    twice = with_costs(once, {kind: second[kind]})
    for signature, cost in twice.costs[kind].items():
        assert cost.runs == 2
        assert cost.seconds == pytest.approx((first[kind][signature].seconds + second[kind][signature].seconds) / 2)
    thrice = with_costs(twice, {kind: second[kind]})
    for signature, cost in thrice.costs[kind].items():
        expected = (first[kind][signature].seconds + 2 * second[kind][signature].seconds) / 3
        assert cost.seconds == pytest.approx(expected)
    assert {other: entries for other, entries in twice.costs.items() if other != kind} == {
        other: entries for other, entries in once.costs.items() if other != kind
    }


@pytest.mark.parametrize(("name", "mesh"), [("gpt2", (2,)), slow("llama", (2,)), slow("gpt2", (2, 2))])
def test_covering_plans_use_more_different_operators_than_random_ones(name, mesh):
    session = PlanningSession(step_reference(name), "titan-rtx-8-pcie", mesh)

    def signatures(plans):
        used = set()
        for plan in plans:
            schedule = schedule_of(plan, session.graph)
            parts = (session.instruction_costs.parts(schedule, each) for each in schedule.instructions)
            used |= {(part.kind, part.signature) for found in parts for part in found if "FLOP" in part.signature}
        return used

    covering = list(covering_plans(session, 40))
    assert len(covering) < 40
    assert list(covering_plans(session, 2)) == covering[:2]
    assert len(signatures(covering)) > len(signatures(random_plans(session, len(covering))))


@pytest.mark.slow
def test_plans_of_a_model_are_measured_until_nothing_is_left(tmp_path):
    path = tmp_path / "here.json"
    calibrate(path=path, seconds_per_kernel=0.01)
    lines = []
    request = PlanRequest(None, "kiwi_reduced", time_limit=5.0)
    plan, report, cluster = calibrate_model(
        step_reference("gpt2"), (2,), request, path=path, sample=1, progress=lines.append
    )
    assert lines[0] == "random plan 1 of 1"
    assert 2 <= len(lines) <= 4
    assert cluster.name == LOCAL_NAME
    assert load_cluster(str(path)) == cluster
    session = session_of(plan, cluster)
    schedule = schedule_of(plan, session.graph)
    assert unmeasured_seconds(session, schedule) == 0.0
    assert report.measured_step_s > 0
    assert session.replay(schedule).total_quanta > 0
