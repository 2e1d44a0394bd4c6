"""Changed clusters and prices of memory, against relations that must hold."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from support.steps.planned_steps import step_reference
from support.tiers import fuzz

from planner.explore.changes import ClusterChange, recosted
from planner.explore.errors import ExploreError
from planner.explore.exploration import Exploration
from planner.explore.memory_prices import SHARES, MemoryPrices
from planner.session import PlanningSession, PlanRequest

CLUSTER = "a100-8-nvlink"


@cache
def exploration(name: str) -> Exploration:
    return Exploration(PlanningSession(step_reference(name), CLUSTER, (2,)), PlanRequest(time_limit=30))


@cache
def prices_of(name: str) -> MemoryPrices:
    return exploration(name).price_of_memory(time_limit=10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", fuzz("llama")])
def test_more_memory_never_costs_more(name):
    here = exploration(name)
    prices = prices_of(name)
    assert len(prices.limits) == len(SHARES)
    planned = [price for price in prices.limits if price.plan is not None]
    assert len(planned) >= 2
    for less, more in pairwise(planned):
        assert more.seconds <= less.seconds
        assert more.bound_seconds <= less.bound_seconds
    for price in planned:
        limit = price.memory_bytes - here.session.cluster.device.reserve_bytes
        assert price.plan.peak_bytes <= limit
        assert price.bound_seconds <= price.seconds
        assert price.plan.decision.options.memory_bytes == price.memory_bytes
    for marginal in prices.marginals:
        if marginal.seconds is not None:
            assert 0 <= marginal.least_seconds <= marginal.seconds <= marginal.most_seconds
    assert planned[-1].seconds == here.plan.objective_seconds
    for row, price in zip(prices.rows(), prices.limits, strict=True):
        assert row["seconds"] == price.seconds
    assert "iB more saves" in prices.title()


def test_memory_that_is_too_little_is_a_row_with_the_reason():
    here = exploration("gpt2")
    reserve = here.session.cluster.device.reserve_bytes
    prices = here.price_of_memory([reserve + 2**12, reserve + 2**30], time_limit=2)
    assert prices.limits[0].plan is None
    assert "too little" in prices.notes()[0]
    assert prices.rows()[0]["seconds"] is None
    with pytest.raises(ExploreError, match="give at least one"):
        here.price_of_memory([])


def test_no_change_gives_the_same_plan_again():
    here = exploration("gpt2")
    same = here.whatif(ClusterChange())
    assert same.same.seconds == here.plan.objective_seconds == same.after.objective_seconds
    assert same.same.peak_bytes == here.plan.peak_bytes
    assert same.gain_seconds == 0
    assert same.after.decision.options.cluster == CLUSTER


@pytest.mark.parametrize(
    "change",
    [
        ClusterChange(bandwidth=0.05),
        ClusterChange(flops=4.0, memory_bandwidth=4.0),
        ClusterChange(bandwidth=0.1, memory=8 * 2**30),
    ],
)
def test_the_new_plan_is_no_worse_than_the_present_one_there(change):
    here = exploration("gpt2")
    found = here.whatif(change)
    assert found.same.fits
    assert found.after.objective_seconds <= found.same.seconds
    assert found.gain_seconds >= 0
    assert found.before is here.plan
    session = PlanningSession(here.session.reference, found.cluster, (2,), traced=here.session.traced)
    again = recosted(session, here.solution.decision, 2**40, None)
    assert again.seconds == found.same.seconds
    assert str(change) in found.title()


def test_slower_links_never_make_a_plan_faster():
    here = exploration("gpt2")
    slower = here.whatif(ClusterChange(bandwidth=0.1))
    assert slower.same.seconds >= here.plan.objective_seconds
    assert slower.after.objective_seconds >= here.plan.bound_seconds
    faster = here.whatif(ClusterChange(flops=2.0))
    assert faster.after.objective_seconds <= here.plan.objective_seconds


@pytest.mark.slow
def test_a_plan_that_needs_more_than_there_is_says_so():
    here = exploration("gpt2")
    reserve = here.session.cluster.device.reserve_bytes
    found = here.whatif(ClusterChange(memory=reserve + int(0.9 * here.plan.peak_bytes)))
    assert not found.same.fits
    assert found.gain_seconds is None
    assert "more than there are" in found.notes()[0]
    assert found.after.peak_bytes < here.plan.peak_bytes


@pytest.mark.slow
def test_other_numbers_of_ranks():
    here = exploration("gpt2")
    four = here.whatif(ClusterChange(mesh=(4,)))
    assert four.after.decision.options.mesh == (4,)
    if four.same.fits:
        assert four.after.objective_seconds <= four.same.seconds
    two_axes = here.whatif(ClusterChange(mesh=(2, 2)))
    assert not two_axes.same.fits
    assert "1 mesh axes, the new mesh has 2" in two_axes.notes()[0]


def test_factors_are_above_nothing():
    with pytest.raises(ExploreError, match="flops 0: give a factor above 0"):
        ClusterChange(flops=0)


def test_pins_stay_under_a_change():
    here = exploration("gpt2")
    here.pin("transformer.h.0.mlp", "recompute")
    found = here.whatif(ClusterChange(bandwidth=0.5))
    here.unpin()
    assert [str(pin) for pin in found.after.decision.options.pins] == ["transformer.h.0.mlp recompute"]
    assert not here.plan.decision.options.pins


@pytest.mark.slow
def test_results_are_short_text_tables_and_files(tmp_path):
    here = exploration("gpt2")
    prices = prices_of("gpt2")
    assert len(repr(prices)) < 2_000
    assert repr(prices).count("\n") <= 12
    assert prices._repr_html_().count("<tr>") == len(prices.limits) + 1
    prices.save(tmp_path / "prices.json")
    read = json.loads((tmp_path / "prices.json").read_text())
    assert read["rows"] == prices.rows()
    assert read["title"] == prices.title()
    frame = pytest.importorskip("pandas") and prices.to_pandas()
    assert list(frame.columns) == list(prices.rows()[0])
    with pytest.raises(ExploreError, match="cannot be written"):
        prices.save("/proc/none/prices.json")
    assert len(repr(replace(here.whatif(ClusterChange())))) < 2_000
    assert len(repr(here)) < 400


def test_ctrl_c_leaves_the_limits_out_that_were_not_tried(monkeypatch):
    here = exploration("gpt2")
    present, solve, calls = here.solution, here.solver.solve, []

    def interrupted(request, *args, **options):
        calls.append(request.memory)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return solve(request, *args, **options)

    monkeypatch.setattr(here.solver, "solve", interrupted)
    peak = present.plan.peak_bytes + here.session.cluster.device.reserve_bytes
    prices = here.price_of_memory([peak, 2 * peak, 3 * peak, 4 * peak], time_limit=2.0)
    assert [price.plan is None for price in prices.limits] == [True, True, False, False]
    assert prices.notes() == ["interrupted: some limits were not tried"]
    assert len(calls) == 3
