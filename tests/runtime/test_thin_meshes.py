"""Plans on meshes with an axis of one rank run like those without it."""

from __future__ import annotations

import pytest
from support.planned_steps import random_plan

from runtime.launch import run_plan


@pytest.mark.parametrize(("name", "mesh"), [("llama", (1, 2)), ("gpt2", (2, 1))])
def test_an_axis_of_one_rank_runs(name, mesh):
    plan = random_plan(name, mesh, 0)
    report = run_plan(plan, steps=2, check=True)
    assert report.failures() == []
    assert report.measured_peak_bytes == report.predicted_peak_bytes == [plan.peak_bytes] * 2
    assert report.loss == pytest.approx(report.reference_loss, rel=1e-5)
