"""What a plan looks like inside: streams without collisions, modules that add up, differences that explain."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.steps.opened_plans import KINDS, opened_plan

from planner.common.plan_error import PlanError
from planner.graph.placement import is_partial, is_shard
from planner.plan.decision import decision_digest
from planner.schedule.instructions import Compute, Offload, Prefetch, Reshard
from planner.view.charts import seconds_by_kind
from planner.view.differences import differences
from planner.view.modules import Figures, module_tree
from planner.view.naming import COPY_IN, COPY_OUT
from planner.view.opened import open_plan
from planner.view.streams import BESIDE, COMPUTATION
from planner.view.timeline import streams_of

CASES = [(kind, mesh) for kind in KINDS for mesh in ((2,), (2, 2))]


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_a_stream_does_one_thing_at_a_time_and_nothing_after_the_step(kind, mesh):
    opened = opened_plan(kind, mesh=mesh)
    for stream in streams_of([opened]):
        # What is awaited shares a link with what is overlapped.
        for beside in (True, False):
            mine = [
                i for i in opened.intervals if i.stream == stream and (i.group in (BESIDE, COPY_OUT, COPY_IN)) == beside
            ]
            for before, after in pairwise(sorted(mine, key=lambda interval: interval.start)):
                assert before.end <= after.start
    assert max(interval.end for interval in opened.intervals) == opened.time.total
    assert min(interval.start for interval in opened.intervals) >= 0
    assert streams_of([opened])[0] == COMPUTATION


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_what_runs_beside_the_computation_starts_at_its_instruction_or_later(kind, mesh):
    opened = opened_plan(kind, mesh=mesh)
    begun = [
        at
        for at, entry in enumerate(opened.schedule.instructions)
        if isinstance(entry, Offload | Prefetch) or (isinstance(entry, Reshard) and entry.overlapped)
    ]
    assert [beside.instruction for beside in opened.time.beside] == begun
    assert bool(begun) == (kind != "serial")
    assert all(beside.start >= opened.starts[beside.instruction] for beside in opened.time.beside)
    overlapped = sum(beside.end - beside.start for beside in opened.time.beside if beside.link >= 0)
    assert overlapped >= opened.time.overlapped, "what shares a link takes longer"
    assert (overlapped > 0) == (kind == "overlapped")


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_modules_and_kinds_add_up_to_the_plan(kind, mesh):
    opened = opened_plan(kind, mesh=mesh)
    whole = module_tree(opened).all
    assert whole.total_ns == opened.plan.decision.predicted.objective_ns
    assert sum(map(sum, seconds_by_kind(opened).values())) == whole.total_ns
    assert whole.peak_bytes == opened.plan.peak_bytes
    assert whole.recomputed == opened.report.recomputed
    assert whole.reshards == opened.report.reshards
    assert whole.offloaded == sum(isinstance(entry, Offload) for entry in opened.schedule.instructions)
    results = [
        opened.schedule.buffers[buffer].placement
        for entry in opened.schedule.instructions
        if isinstance(entry, Compute) and not entry.recompute and not opened.graph.operators[entry.operator].is_view
        for buffer in entry.outputs
        if buffer is not None
    ]
    assert whole.placement_kinds["partial"] == sum(any(map(is_partial, placement)) for placement in results)
    assert whole.placements.total() == len(results)
    assert any(is_shard(entry) for placement in whole.placements for entry in placement)


def test_a_module_has_what_is_inside_it():
    root = module_tree(opened_plan("serial"))
    for module in root.walk():
        total = Figures()
        total.add(module.own)
        for child in module.children.values():
            total.add(child.all)
            assert child.path.startswith(module.path)
        assert total == module.all
    assert root.at("transformer.h.0.attn").all.total_ns > 0
    assert root.at("transformer.h.0.attn").all.state_bytes > 0


def test_differences_of_modules_explain_that_of_the_plans():
    left, right = opened_plan("serial"), opened_plan("serial", seed=2)
    trees = [module_tree(plan) for plan in (left, right)]
    found = differences(left, right, *trees)
    gained = sum(entry.count * entry.nanoseconds for entry in found)
    assert gained == right.time.total - left.time.total
    assert sum(len(entry.paths) for entry in found) == len({path for entry in found for path in entry.paths})
    assert differences(left, left, trees[0], trees[0]) == []
    assert any(" → " in entry.placements for entry in found)


def test_equal_layers_share_a_row():
    left, right = opened_plan("serial"), opened_plan("overlapped")
    found = differences(left, right, module_tree(left), module_tree(right))
    for entry in found:
        assert (entry.count > 1) == ("*" in entry.name)
        assert len(entry.numbers.split(", ")) == entry.count


def test_a_plan_is_verified_before_it_is_shown():
    made = opened_plan("serial")
    with pytest.raises(PlanError, match="cluster is"):
        open_plan("plan.json", made.plan, session=made.session)
    decision = made.plan.decision.model_copy(update={"fingerprints": made.session.fingerprints})
    plan = made.plan.model_copy(update={"decision": decision, "digest": decision_digest(decision)})
    opened = open_plan("plan.json", plan, session=made.session)
    assert opened.session is made.session
    assert opened.time == made.time
