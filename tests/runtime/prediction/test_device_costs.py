"""Costs of a device from the report of its check: the plan that ran is predicted to take what it took."""

from __future__ import annotations

import json

import numpy as np
import pytest

from planner.benchmarks.device_plans import CASES
from planner.machine.known_costs import CostSource
from planner.plan.document import schedule_of
from planner.session import PlanningSession
from runtime.gpu_check.plans import required
from runtime.prediction.device_costs import device_cluster

NAME = "gpt2-half"


def report_of(plan, step_seconds: float) -> tuple[dict, list[int]]:
    random = np.random.default_rng(0)
    times = random.integers(1_000, 50_000, len(schedule_of_case(plan).instructions)).tolist()
    figures = {"instruction_ns": times, "measured_seconds": step_seconds}
    other = {"name": "dropout", "figures": {}}
    return {"outcomes": [other, {"name": f"time by class, {NAME}", "figures": figures}]}, times


def schedule_of_case(plan):
    return schedule_of(plan, PlanningSession(CASES[NAME].reference, "h200-8-nvlink", (1,)).graph)


def test_the_plan_that_ran_is_predicted_as_it_ran(tmp_path):
    plan, seconds = required(NAME), 0.25
    report, times = report_of(plan, seconds)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    cluster = device_cluster(file, "h200-8-nvlink")
    session = PlanningSession(CASES[NAME].reference, cluster, (1,))
    schedule = schedule_of(plan, session.graph)
    costs = session.instruction_costs
    priced = [bool(costs.parts(schedule, entry)) for entry in schedule.instructions]
    counted = sum(time for time, known in zip(times, priced, strict=True) if known)
    found = costs.seconds_by_source(schedule)
    assert found[CostSource.MEASURED] == pytest.approx(seconds * counted / sum(times), rel=1e-3)
    assert sum(found.values()) == pytest.approx(found[CostSource.MEASURED])


def test_operators_can_be_left_out(tmp_path):
    report, _ = report_of(required(NAME), 0.25)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    all_costs, fewer = (device_cluster(file, "h200-8-nvlink", without).costs for without in ((), ("attention",)))
    left_out = {kind for kind in all_costs if "attention" in kind}
    assert left_out
    assert {*fewer} == {*all_costs} - left_out
