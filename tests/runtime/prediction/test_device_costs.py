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


def report_of(plan, step_seconds: float) -> dict:
    random = np.random.default_rng(0)
    times = random.integers(1_000, 50_000, len(schedule_of_case(plan).instructions)).tolist()
    figures = {"instruction_ns": times, "measured_seconds": step_seconds}
    other = {"name": "dropout", "figures": {}}
    return {"outcomes": [other, {"name": f"time by class, {NAME}", "figures": figures}]}


def schedule_of_case(plan):
    return schedule_of(plan, PlanningSession(CASES[NAME].reference, "h200-8-nvlink", (1,)).graph)


def test_the_plan_that_ran_is_predicted_as_it_ran(tmp_path):
    plan, seconds = required(NAME), 0.25
    report = report_of(plan, seconds)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    cluster = device_cluster(file, "h200-8-nvlink")
    session = PlanningSession(CASES[NAME].reference, cluster, (1,))
    schedule = schedule_of(plan, session.graph)
    found = session.instruction_costs.seconds_by_source(schedule)
    assert found[CostSource.MEASURED] == pytest.approx(seconds, rel=1e-3)
    assert sum(found.values()) == pytest.approx(found[CostSource.MEASURED])
