"""Plans of layers explored: pins, changed clusters, prices of memory, batches and sweeps."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
from support.layers import folded_layers
from support.layers.folded_layers import small_cluster
from support.steps.planned_steps import step_reference
from support.tiers import fuzz, slow

from planner import api
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.explore.grid import Grid
from planner.explore.layers import LayerExploration
from planner.explore.memory_prices import SHARES
from planner.explore.sweeping import run_sweep
from planner.layers import planning as layer_planning
from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import load_layer_plan
from planner.layers.planning import LAYER_FORMULATIONS
from planner.plan.notes import INTERRUPTED
from planner.session import PlanRequest

BLOCK = "transformer.h.1"
FORMULATIONS = ["h3t", slow("osdp"), "galvatron", slow("capture")]


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_planning, "model_layers", folded_layers.model_layers)


@cache
def exploration(formulation: str, share: float = 1.0) -> LayerExploration:
    memory = None if share == 1.0 else int(share * exploration(formulation).plan.peak_bytes)
    return api.explore(
        step_reference("gpt2"), cluster=small_cluster(), mesh=(4,), memory=memory, formulation=formulation
    )


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_a_pin_is_kept_costs_what_is_proven_and_is_taken_back(formulation: str) -> None:
    here = exploration(formulation)
    first = here.plan
    name = next(name for name in here.layers if name.startswith(BLOCK))
    settings = next(layer for layer in first.layers if layer.name == name)
    decision = f"sharding={settings.sharding}" if formulation in ("osdp", "h3t") else "tensor_parallel=2"
    change = here.forbid(name, decision)
    assert change.before is first
    assert [str(pin) for pin in change.after.record.pins] == [f"{name} not {decision}"]
    check_layer_plan(change.after)
    assert change.after.objective_seconds >= first.bound_seconds if first.bound_seconds is not None else True
    if change.least_seconds is not None and change.most_seconds is not None:
        assert change.least_seconds <= change.seconds <= change.most_seconds
    assert f"{name} not {decision}" in str(change)
    assert here.unpin().after is first
    assert here.pins == ()


def test_nothing_is_traced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    here = exploration("h3t")
    _ = here.plan
    monkeypatch.setattr(layer_planning, "layers_of", None)
    here.pin(BLOCK, "keep")
    here.unpin()
    with pytest.raises(PlanError, match=r"'transformer\.h\.7' names no layer"):
        here.pin("transformer.h.7", "keep")
    assert here.pins == ()


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_the_present_settings_on_a_changed_cluster_are_no_better_than_a_new_plan(formulation: str) -> None:
    here = exploration(formulation)
    found = here.whatif(api.ClusterChange(bandwidth=0.25))
    assert found.before is here.plan
    assert found.same.fits, found.same.reason
    if formulation != "capture":  # which looks for the least peak
        assert found.gain_seconds >= -2e-3 * found.same.seconds
        assert found.after.objective_seconds >= here.plan.bound_seconds
    same = here.recosted(here.plan)
    assert same.seconds == pytest.approx(here.plan.objective_seconds, rel=1e-3)
    fewer = here.whatif(api.ClusterChange(mesh=(2,)))
    assert fewer.after.devices == 2
    if formulation != "capture":  # whose layers may be on one device each, with fewer stages
        assert not fewer.same.fits
        assert "the present plan does not do there" in str(fewer)


@pytest.mark.parametrize("formulation", ["h3t", slow("galvatron")])
def test_more_memory_never_costs_more(formulation: str) -> None:
    prices = exploration(formulation).price_of_memory()
    assert len(prices.limits) == len(SHARES)
    planned = [price for price in prices.limits if price.plan is not None]
    assert len(planned) >= 3
    seconds = [price.seconds for price in planned]
    assert seconds == sorted(seconds, reverse=True)
    for price in planned:
        assert max(price.plan.record.stage_peak_bytes) <= price.memory_bytes
        assert price.bound_seconds is None or price.bound_seconds <= price.seconds * (1 + 1e-9)


@pytest.mark.parametrize("formulation", [fuzz("osdp"), "h3t"])
def test_the_largest_batch_of_layers_fits_and_the_next_does_not(formulation: str) -> None:
    small = exploration(formulation).plan
    request = PlanRequest(formulation=formulation, memory=2 * small.peak_bytes, time_limit=5.0)
    asked = {"cluster": small_cluster(), "mesh": (4,), "request": request}
    found = api.largest_batch(step_reference("gpt2"), most=64, **asked)
    assert found.plan.model.batch == found.batch
    verdicts = {int(tried.name): tried.verdict for tried in found.tried}
    assert verdicts[found.batch] == "planned"
    assert found.batch == 64 or verdicts[found.batch + 4] == "no plan"
    with pytest.raises(InfeasibleError, match="batch 4: not even that fits"):
        api.largest_batch(step_reference("gpt2"), **asked | {"request": replace(request, memory=1000)})
    best = api.best_mesh(step_reference("gpt2"), 4, cluster=small_cluster(), request=replace(request, memory=None))
    assert best.plan.objective_seconds == small.objective_seconds


def test_a_sweep_takes_formulations_of_layers_once_for_all_solvers(tmp_path) -> None:
    reference = step_reference("gpt2")
    grid = Grid(
        reference,
        small_cluster(),
        [(2,), (4,)],
        formulations=("sharding", "h3t"),
        solvers=("greedy", "lagrangian"),
        request=PlanRequest(time_limit=2.0),
    )
    with ThreadPoolExecutor(1) as executor:
        found = run_sweep("gpt2", list(grid), executor, tmp_path, keep_plans=True)
        again = run_sweep("gpt2", list(grid), executor, tmp_path, keep_plans=True)
    assert again.known == len(again.sweep_rows) == 6
    rows = [row for row in found.sweep_rows if row.formulation == "h3t"]
    assert [(row.mesh, row.solver, row.status) for row in rows] == [
        ("2", "its own", "optimal"),
        ("4", "its own", "optimal"),
    ]
    plan = load_layer_plan(tmp_path / rows[1].plan_file)
    assert plan.settings_digest() == rows[1].digest
    assert plan.objective_seconds == rows[1].seconds


def test_every_formulation_of_layers_is_explored_or_refused_by_name() -> None:
    assert set(LAYER_FORMULATIONS) == {"osdp", "galvatron", "h3t", "capture"}
    asked = {"cluster": small_cluster(), "mesh": (4,)}
    with pytest.raises(PlanError, match="objective time: h3t has no such choice"):
        _ = api.explore(step_reference("gpt2"), formulation="h3t", choices={"objective": "time"}, **asked).plan
    with pytest.raises(PlanError, match="kiwi_chain has no published form"):
        api.explore(step_reference("gpt2"), formulation="kiwi_chain", as_published=True, **asked)


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_a_plan_of_layers_is_explained(formulation: str, tmp_path) -> None:
    free = exploration(formulation).plan
    plan = free if formulation in ("capture", "osdp") else exploration(formulation, 0.9).plan
    text = str(api.explain(plan, cluster=small_cluster(), time_limit=2.0))
    for title in ("Settings by stage", "Costliest layers", "Recomputed and offloaded", "Memory at the peak"):
        assert title in text
    assert f"as {formulation} counts" in text
    assert " more: " in text
    checkpointed = sum(layer.checkpoint for layer in plan.layers)
    assert (f"{checkpointed} layers recomputed" in text) == (checkpointed > 0)
    assert "<h4>Costliest layers</h4>" in api.explain(plan, cluster=small_cluster(), time_limit=2.0)._repr_html_()
    by_hand = plan.model_copy(update={"record": None})
    assert [section.title for section in api.explain(by_hand).sections] == ["Settings by stage"]


@pytest.mark.parametrize("option", [{"solver": "highs"}, {"workers": 1}, {"gap": 0.1}, {"host_memory": 2**30}])
def test_what_a_search_over_layers_does_not_use_is_refused(option) -> None:
    (name,) = option
    with pytest.raises(PlanError, match=f"{name} .*: h3t plans layers by a search of its own; leave it out"):
        api.plan(step_reference("gpt2"), cluster=small_cluster(), mesh=(4,), formulation="h3t", **option)


def test_a_search_over_layers_that_ctrl_c_cut_short_goes_on() -> None:
    seen: list[object] = []

    def interrupt(progress: object) -> None:
        seen.append(progress)
        if len(seen) == 1:
            signal.raise_signal(signal.SIGINT)

    here = api.explore(
        step_reference("gpt2"),
        cluster=small_cluster(),
        mesh=(4,),
        formulation="galvatron",
        request=PlanRequest(formulation="galvatron", time_limit=5.0),
        progress=interrupt,
    )
    short = here.plan
    assert INTERRUPTED in short.record.notes
    assert here.plan is short, "it is the present plan until another one is asked for"
    begun = len(seen)
    change = here.improve(5.0)
    assert change.before is short
    assert len(seen) > begun
    assert INTERRUPTED not in change.after.record.notes
    assert change.after.objective_seconds <= short.objective_seconds
    assert change.after.bound_seconds >= short.bound_seconds
    begun = len(seen)
    assert here.unpin().after is here.improve(4.0).after is change.after
    assert len(seen) == begun


def test_a_worse_plan_of_layers_leaves_the_known_one_with_the_higher_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    here = api.explore(step_reference("gpt2"), cluster=small_cluster(), mesh=(4,), formulation="galvatron")
    known = here.plan
    seconds, bound = known.objective_seconds, known.bound_seconds
    loose = known.record.model_copy(update={"bound_seconds": bound / 2, "gap": 0.5, "status": "feasible"})
    here._plans[here._present] = known.model_copy(update={"record": loose})
    worse = known.record.model_copy(update={"objective_seconds": 2 * seconds, "status": "feasible"})
    monkeypatch.setattr(here, "_solve", lambda *_: known.model_copy(update={"record": worse}))
    found = here.improve(100.0).after
    assert (found.objective_seconds, found.bound_seconds) == (seconds, bound)
    assert found.gap == pytest.approx((seconds - bound) / seconds)


def test_ctrl_c_in_a_search_over_layers_ends_the_search_for_a_batch() -> None:
    """The search for one batch ends with its best plan, and no other batch is tried."""
    seen = []

    def interrupt(progress):
        seen.append(progress)
        if len(seen) == 1:
            signal.raise_signal(signal.SIGINT)

    request = PlanRequest(formulation="galvatron", time_limit=5.0)
    asked = {"cluster": small_cluster(), "mesh": (4,), "most": 64, "request": request}
    found = api.largest_batch(step_reference("gpt2"), progress=interrupt, **asked)
    assert seen
    assert (found.interrupted, len(found.tried)) == (True, 1)
    assert found.plan.model.batch == found.batch == 4
