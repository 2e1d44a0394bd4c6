"""The best mesh and the largest batch: what is pruned is really not better, and what is found really fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.steps.planned_steps import step_reference
from support.tiers import fuzz, slow

from planner import api
from planner.common.infeasibility import InfeasibleError
from planner.explore import candidates
from planner.explore.candidates import meshes_of
from planner.explore.errors import ExploreError
from planner.explore.warm import WarmSolver
from planner.machine.cluster import load_cluster
from planner.session import PlanRequest

CLUSTER = "a100-8-nvlink"
REQUEST = PlanRequest(time_limit=30.0)
SHORT = PlanRequest(time_limit=3.0)
"""For searches that end with limits that nothing fits."""


@pytest.mark.parametrize("name", ["mlp", slow("gpt2")])
def test_what_is_pruned_is_not_better(name, monkeypatch):
    found = api.best_mesh(step_reference(name), 4, cluster=CLUSTER, request=REQUEST)
    assert {tried.name for tried in found.tried} == {"4", "2x2"}
    assert found.plan.decision.options.mesh == found.mesh
    for tried in found.tried:
        assert tried.verdict in ("planned", "pruned")
        if tried.plan is not None:
            assert found.plan.objective_seconds <= tried.plan.objective_seconds
        else:
            assert tried.bound_seconds >= found.plan.objective_seconds
            assert tried.reason
    monkeypatch.setattr(candidates, "_pruned", lambda *_: None)
    every = api.best_mesh(step_reference(name), 4, cluster=CLUSTER, request=REQUEST)
    assert all(tried.verdict == "planned" for tried in every.tried)
    assert every.plan.objective_seconds == found.plan.objective_seconds
    planned = {tried.name: tried.plan for tried in every.tried}
    for tried in found.tried:
        if tried.verdict == "pruned":
            assert planned[tried.name].objective_seconds >= tried.bound_seconds


def test_meshes_are_all_ordered_factorizations():
    assert meshes_of(1) == [(1,)]
    assert meshes_of(7) == [(7,)]
    assert meshes_of(8) == [(8,), (2, 4), (4, 2)]
    assert meshes_of(8, 3) == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert meshes_of(12, 1) == [(12,)]
    with pytest.raises(ExploreError, match="0 ranks on 2 axes"):
        meshes_of(0)


def test_meshes_that_do_not_fit_the_cluster_are_named():
    with pytest.raises(InfeasibleError, match=r"16 ranks: no mesh has a plan .*16: mesh 16 has 16 devices but cluster"):
        api.best_mesh(step_reference("mlp"), 16, cluster=CLUSTER, request=REQUEST)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", fuzz("gpt2")])
def test_the_largest_batch_fits_and_the_next_does_not(name):
    cluster = load_cluster(CLUSTER)
    reference = step_reference(name)
    reserve = cluster.device.reserve_bytes
    small = api.plan(replace(reference, batch=4), cluster=cluster, mesh=(2,), time_limit=30.0)
    memory = reserve + 2 * small.peak_bytes
    found = api.largest_batch(reference, cluster=cluster, mesh=(2,), memory=memory, request=SHORT, most=32)
    assert found.batch >= 4
    assert found.batch % 2 == 0
    assert found.plan.decision.model.batch == found.batch
    assert found.plan.peak_bytes + reserve <= memory
    (row,) = (row for row in found.rows() if row["candidate"] == str(found.batch))
    assert row["seconds"] == found.plan.objective_seconds
    assert "most" in found.notes()[0] if found.batch == 32 else "did not fit" in found.notes()[0]
    verdicts = {int(tried.name): tried.verdict for tried in found.tried}
    assert verdicts[found.batch] == "planned"
    assert verdicts.get(found.batch + 2, "no plan") != "planned"
    for batch, verdict in verdicts.items():
        assert (verdict == "planned") == (batch <= found.batch)
    pruned = [batch for batch, verdict in verdicts.items() if verdict == "pruned"]
    for batch in pruned[:1]:
        with pytest.raises(InfeasibleError):
            api.plan(replace(reference, batch=batch), cluster=cluster, mesh=(2,), memory=memory, time_limit=3.0)


def test_the_plan_of_the_largest_batch_is_kept_where_the_last_search_finds_none(monkeypatch):
    solve = WarmSolver.solve

    def gives_up(self, request, **options):
        if options.get("second", True):  # the search for the best plan, not one for any
            raise InfeasibleError("no plan was found in the time limit")
        return solve(self, request, **options)

    monkeypatch.setattr(WarmSolver, "solve", gives_up)
    found = api.largest_batch(step_reference("mlp"), cluster=CLUSTER, mesh=(2,), request=SHORT, most=4)
    assert found.batch == 4
    assert found.plan is next(tried.plan for tried in found.tried if tried.name == "4")


SOLVE = WarmSolver.solve


class Interrupting:
    """In place of :meth:`WarmSolver.solve`: call number ``at``, from 1, is a Ctrl-C before anything was found."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __get__(self, solver, owner):
        def solve(request, *args, **options):
            self.calls += 1
            if self.calls == self.at:
                raise KeyboardInterrupt
            return SOLVE(solver, request, *args, **options)

        return solve


def test_ctrl_c_ends_the_search_for_a_mesh_with_the_best_so_far(monkeypatch):
    monkeypatch.setattr(candidates, "_pruned", lambda *_: None)
    monkeypatch.setattr(WarmSolver, "solve", Interrupting(2))
    found = api.best_mesh(step_reference("mlp"), 8, cluster=CLUSTER, request=SHORT)
    assert [tried.verdict for tried in found.tried] == ["planned", "not tried", "not tried"]
    assert found.plan is found.tried[0].plan
    assert found.notes() == ["interrupted: not all were tried"]
    monkeypatch.setattr(WarmSolver, "solve", Interrupting(3))
    with pytest.raises(KeyboardInterrupt):  # the first call of another search that has nothing yet
        [api.best_mesh(step_reference("mlp"), 2, cluster=CLUSTER, request=SHORT) for _ in range(3)]


def test_ctrl_c_ends_the_search_for_a_batch_with_the_largest_so_far(monkeypatch):
    interrupting = Interrupting(3)
    monkeypatch.setattr(WarmSolver, "solve", interrupting)
    found = api.largest_batch(step_reference("mlp"), cluster=CLUSTER, mesh=(2,), request=SHORT, most=64)
    assert (found.batch, found.interrupted, interrupting.calls) == (4, True, 3)
    assert found.plan.decision.model.batch == 4
    assert found.notes() == ["interrupted: not all were tried"]


def test_no_batch_at_all_is_refused():
    reserve = load_cluster(CLUSTER).device.reserve_bytes
    with pytest.raises(InfeasibleError, match="batch 2: not even that fits"):
        api.largest_batch(step_reference("mlp"), cluster=CLUSTER, mesh=(2,), memory=reserve + 64, request=SHORT)
    with pytest.raises(ExploreError, match="multiples of 0"):
        api.largest_batch(step_reference("mlp"), cluster=CLUSTER, mesh=(2,), multiple=0)
