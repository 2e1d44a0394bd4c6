"""Galvatron-BMW's Figure 5: plans of small models, the estimator's seconds for them, and steps that run."""

from __future__ import annotations

import pytest
from support.layers.layer_plan_models import layer_reference

from planner.machine.cluster import ClusterError, load_cluster
from planner.papers.claims.claim import Verdict, claim_rows
from planner.papers.claims.galvatron import RULES
from runtime.prediction.local_tables import figure_5
from runtime.prediction.local_tables.figure_5 import SLOWDOWNS, TABLES, LocalSteps, local_plans, step_rows


@pytest.fixture
def preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset in place of this machine, which need not be calibrated."""
    monkeypatch.setattr(figure_5, "load_cluster", lambda name: load_cluster("titan-rtx-8-pcie"))


@pytest.mark.usefixtures("preset")
def test_overlapping_slows_only_what_reduces_gradients_beside_computation() -> None:
    steps = LocalSteps.of(layer_reference("gpt2"))
    slowed = {}
    for name, plan in local_plans(steps):
        layers = steps.layer_plan(plan)  # which the executor accepts
        assert layers.devices == 2
        seconds = steps.seconds(plan)
        assert seconds.keys() == SLOWDOWNS.keys()
        slowed[name] = seconds["with_slowdown"] > seconds["without"]
    assert len(slowed) > 15
    assert slowed["1 stages, 1 micro-batches, dp2"]
    assert slowed["1 stages, 1 micro-batches, sdp2-ckpt"]
    assert not any(slower for name, slower in slowed.items() if name.startswith("2 stages"))


@pytest.mark.usefixtures("preset")
def test_the_times_of_a_profile_are_those_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(steps: LocalSteps, batch: int, micro_batches: int) -> float:
        assert steps.devices == 1
        return 0.5 + 0.25 * micro_batches + 0.125 * batch

    monkeypatch.setattr(LocalSteps, "_alone", measured)
    profiled = LocalSteps.profiled(layer_reference("gpt2"))
    assert profiled.update_seconds == pytest.approx(0.5)
    layers = profiled.chain.layers
    assert sum(layer.forward_seconds + layer.backward_seconds for layer in layers) == pytest.approx(0.125)
    assert sum(layer.fixed_seconds for layer in layers) == pytest.approx(0.25)
    batch = profiled.reference.batch
    plain = dict(local_plans(profiled))["1 stages, 1 micro-batches, dp2"]
    assert profiled.seconds(plain)["without"] >= 0.5 + 0.25 + 0.125 * batch / 2


def test_a_machine_that_is_not_calibrated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ClusterError(f"{name} is not calibrated")

    monkeypatch.setattr(figure_5, "load_cluster", refuse)
    with pytest.raises(ClusterError, match="local-cpu is not calibrated"):
        LocalSteps.of(layer_reference("gpt2"))


@pytest.mark.fuzz
@pytest.mark.usefixtures("preset")
def test_plans_run_and_are_timed() -> None:
    rows = list(step_rows("llama", 2))
    assert [row["plan"].rpartition(" ")[2] for row in rows] == ["dp2", "sdp2"]
    assert all(row["measured"] > 0 for row in rows)


def test_the_claims_are_answered_by_mean_errors() -> None:
    table = [
        {"model": "m", "plan": "p", "measured": 1.0, "with_slowdown": 0.97, "without": 0.8},
        {"model": "m", "plan": "q", "measured": 1.0, "with_slowdown": 1.03, "without": 0.8},
    ]
    answers = {row.claim.key: row.answer for row in claim_rows("galvatron", RULES, {"figure_5": table})}
    found = answers["figure_5/mean_error_with_slowdown_pct_below"]
    assert (found.ours, found.verdict) == ("3.0 % over 2 plans", Verdict.HOLDS)
    assert answers["figure_5/mean_error_without_pct_above"].verdict is Verdict.HOLDS
    assert [cell.label for cell in TABLES["figure_5"].cells()] == ["gpt2", "llama"]
