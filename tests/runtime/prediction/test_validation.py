"""Validation: errors and order of predictions, and plans that run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.layers.layer_plan_models import layer_reference
from support.steps.planned_steps import random_plan, step_reference
from typer.testing import CliRunner

from planner.common.plan_error import PlanError
from planner.layers.plan.document import save_layer_plan
from planner.layers.planning import plan_layers
from planner.plan.document import save_plan
from planner.session import PlanningSession
from runtime.commands.main import app
from runtime.prediction.random_plans import random_plans
from runtime.prediction.validation import ValidatedPlan, Validation, validate


def validated(*times, memory=(100, 100)):
    return Validation(tuple(ValidatedPlan(str(k), *pair, *memory) for k, pair in enumerate(times)))


def test_errors_are_relative_to_what_was_predicted():
    found = validated((1.0, 1.1), (2.0, 1.6), memory=(100, 102))
    assert [plan.time_error for plan in found.plans] == pytest.approx([0.1, -0.2])
    assert found.mean_time_error == pytest.approx(0.15)
    assert found.mean_memory_error == pytest.approx(0.02)


def test_the_rank_correlation_is_that_of_the_order():
    assert validated((1, 10), (2, 20), (3, 900)).rank_correlation == pytest.approx(1.0)
    assert validated((1, 3), (2, 2), (3, 1)).rank_correlation == pytest.approx(-1.0)
    assert validated((1, 1), (2, 2)).rank_correlation is None
    rng = np.random.default_rng(0)
    for _ in range(50):
        order = rng.permutation(12)
        distance = 6 * sum((k - int(at)) ** 2 for k, at in enumerate(order)) / (12 * (144 - 1))
        found = validated(*((1.0 + k, 1.0 + at) for k, at in enumerate(order.tolist())))
        assert found.rank_correlation == pytest.approx(1 - distance)
    assert validated((1, 5), (1, 5), (2, 7), (3, 6)).rank_correlation == pytest.approx(7 / 9)


def test_the_plan_of_least_predicted_time_is_compared_with_the_fastest():
    assert validated((1.0, 1.2), (1.5, 1.0)).chosen_over_best == pytest.approx(1.2)
    assert validated((1.0, 1.0), (1.5, 2.0)).chosen_over_best == 1.0


def of_rounds(*runs):
    return Validation(tuple(ValidatedPlan(str(k), 1.0, 1.0, 1, 1, each) for k, each in enumerate(runs)))


def test_rounds_say_how_well_a_measurement_repeats():
    found = of_rounds((1.0, 1.1), (2.0, 2.0), (3.0, 2.4))
    assert found.repeatability == pytest.approx(1.0)
    assert found.mean_spread == pytest.approx((0.1 + 0.0 + 0.25) / 3)
    # Pairs of three rounds: the same order once, the reverse order twice.
    assert of_rounds((1, 1, 9), (2, 2, 8), (3, 3, 7)).repeatability == pytest.approx(-1 / 3)
    one = of_rounds((1.0,), (2.0,), (3.0,))
    assert one.repeatability is None
    assert one.mean_spread is None


def test_each_round_runs_every_plan_and_medians_count(monkeypatch):
    plans = [(str(k), random_plan("mlp", (2,), k)) for k in range(2)]
    seconds = iter((1.0, 10.0, 5.0, 20.0, 2.0, 90.0))
    ran = []

    class Report:
        def __init__(self):
            self.measured_step_s = next(seconds)
            self.measured_peak_bytes = [len(ran), 1]

    def run(_, plan, steps):
        ran.append((plan.digest, steps))
        return Report()

    monkeypatch.setattr("runtime.prediction.plan_pool.PlanPool.run", run)
    named = []
    found = validate(plans, steps=3, rounds=3, progress=named.append)
    assert ran == [(plan.digest, 3) for _ in range(3) for _, plan in plans]
    assert [plan.measured_s for plan in found.plans] == [2.0, 20.0]
    assert [plan.runs_s for plan in found.plans] == [(1.0, 5.0, 2.0), (10.0, 20.0, 90.0)]
    assert [plan.measured_bytes for plan in found.plans] == [5, 6]
    assert named[:3] == ["0, round 1 of 3", "1, round 1 of 3", "0, round 2 of 3"]


@pytest.mark.slow
def test_plans_that_run_have_the_memory_that_they_predict(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the extra notebooks")
    plan = random_plan("mlp", (2,), 0, "sgd")
    save_plan(plan, tmp_path / "plan.json")
    results, plot = tmp_path / "results.json", tmp_path / "scatter.png"
    outputs = ["--json", str(results), "--plot", str(plot)]
    ran = CliRunner().invoke(app, ["validate", str(tmp_path / "plan.json"), "--steps", "2", "--allow-code", *outputs])
    assert ran.exit_code == 0, ran.output
    (row,) = json.loads(results.read_text())["plans"]
    assert row["measured_bytes"] == row["predicted_bytes"] == plan.peak_bytes
    assert row["measured_s"] > 0
    assert row["predicted_s"] == plan.objective_seconds
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_plans_of_layers_run_as_well(tmp_path):
    plan = plan_layers(layer_reference("gpt2"), cluster="titan-rtx-8-pcie", devices=2, formulation="osdp")
    save_layer_plan(plan, tmp_path / "layers.json")
    results = tmp_path / "results.json"
    arguments = ["validate", str(tmp_path / "layers.json"), "--steps", "2", "--device", "cpu", "--json", str(results)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    (row,) = json.loads(results.read_text())["plans"]
    assert row["predicted_s"] == plan.record.objective_seconds
    assert row["predicted_bytes"] == max(peak.nbytes for peak in plan.record.engine_peaks)
    assert 0.5 < row["measured_bytes"] / row["predicted_bytes"] < 2.0
    with pytest.raises(PlanError, match="plan one predicts no time or no peak"):
        validate([("one", plan.model_copy(update={"record": None}))])


def test_without_plans_or_steps_to_time_nothing_is_run():
    with pytest.raises(ValueError, match="0 plans"):
        validate([])
    with pytest.raises(ValueError, match="1 steps"):
        validate([("one", random_plan("mlp", (2,), 0))], steps=1)
    with pytest.raises(ValueError, match="0 rounds"):
        validate([("one", random_plan("mlp", (2,), 0))], rounds=0)


def test_random_plans_differ_and_are_the_same_for_the_same_seed():
    session = PlanningSession(step_reference("gpt2"), "a100-8-nvlink", (2,))
    first, again = ([plan.digest for plan in random_plans(session, 5, seed)] for seed in (3, 3))
    assert first == again
    assert len(set(first)) == 5
    assert [plan.digest for plan in random_plans(session, 4, 4)] == first[1:]
