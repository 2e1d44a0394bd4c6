"""Pins: what they restrict, what they refuse, and what they cost."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.steps.planned_steps import step_reference

from formulations.solvers.processes.worker import Ending
from formulations.step.solving.pinned import Allowed, Holding, holding_of, pinned
from planner import api
from planner.explore.errors import ExploreError
from planner.explore.exploration import Exploration
from planner.explore.pinning import PinChange
from planner.explore.pins import allowed_by, pin_of
from planner.explore.targets import node_name, nodes_of
from planner.explore.warm import WarmSolver
from planner.models.references import ModelReference
from planner.plan.decision import Pin
from planner.plan.document import PlanError, schedule_of, verify_plan
from planner.plan.notes import INTERRUPTED
from planner.schedule.instructions import Compute
from planner.session import PlanningSession, PlanRequest

CLUSTER = "a100-8-nvlink"
MODULE = {"gpt2": "transformer.h.1.mlp", "llama": "model.layers.1.mlp"}


@cache
def session(name: str = "gpt2", mesh: tuple[int, ...] = (2,)) -> PlanningSession:
    return PlanningSession(step_reference(name), CLUSTER, mesh)


opened: dict[tuple[str, float | None], Exploration] = {}


def exploration(name: str = "gpt2", share: float | None = None) -> Exploration:
    """One for all tests of this file; each leaves it without pins."""
    if (name, share) not in opened:
        here, memory = session(name), None
        if share is not None:
            free = exploration(name).plan.peak_bytes
            memory = int(free * share) + here.costs.device.reserve_bytes
        opened[name, share] = Exploration(here, PlanRequest(memory=memory, time_limit=10))
    return opened[name, share]


@pytest.fixture(autouse=True)
def without_pins():
    yield
    for here in opened.values():
        if here.pins:
            here.unpin()


def reruns(plan) -> set[str]:
    graph = session_of_plan(plan).graph
    schedule = schedule_of(plan, graph)
    return {
        graph.operators[step.operator].identity
        for step in schedule.instructions
        if isinstance(step, Compute) and step.recompute
    }


def session_of_plan(plan) -> PlanningSession:
    return next(session(name) for name in MODULE if step_reference(name).source == plan.decision.model.source)


def accepted(plan) -> bool:
    here = session_of_plan(plan)
    report = verify_plan(
        plan, here.graph, here.fingerprints, seconds=here.instruction_costs, allowed=here.allowed_strategies
    )
    return report.peak_bytes == plan.peak_bytes


@pytest.mark.fast_cases("gpt2-0.9")
@pytest.mark.parametrize("share", [None, 0.9])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_pin_never_lowers_the_optimum_and_unpinning_gives_the_former_plan(name, share):
    here = exploration(name, share)
    first = here.plan
    change = here.pin(MODULE[name], "recompute")
    assert change.before is here.history[-1].before
    assert change.after.objective_seconds >= change.before.objective_seconds >= change.before.bound_seconds
    assert change.after.bound_seconds >= change.before.bound_seconds
    assert change.least_seconds <= change.seconds <= change.most_seconds
    assert accepted(change.after)
    assert ("pinned", f"{MODULE[name]} recompute") in change.after.rows()
    back = here.unpin()
    assert here.pins == ()
    assert back.after.objective_seconds <= first.objective_seconds
    if back.after.objective_seconds == first.objective_seconds:
        assert back.after.digest == first.digest


def test_what_is_pinned_is_done():
    here, module = exploration(), MODULE["gpt2"]
    recomputed = here.pin(module, "recompute").after
    model, space = here.session.space.model, here.session.space
    wanted = {
        node_name(space, k) for k in nodes_of(space, module) if model.rerunnable[k] and model.first_backward_use[k] >= 0
    }
    assert wanted
    assert wanted <= reruns(recomputed)
    here.unpin()
    kept = here.pin("*", "keep").after
    assert reruns(kept) == set()
    here.unpin()
    weight = "transformer.h.0.mlp.c_fc.weight"
    for placement in ("R", "S0", "S1"):
        plan = here.pin(weight, placement).after
        assert accepted(plan)
        schedule = schedule_of(plan, here.session.graph)
        placed = {
            here.session.graph.values[schedule.buffers[b].value].name: schedule.buffers[b].placement
            for b in schedule.inputs
        }
        assert placed[weight] == (placement,)
        here.unpin(weight)


def test_pinning_what_the_plan_does_anyway_costs_nothing():
    here = exploration()
    layouts, space = here.solution.decision.layouts, here.session.space
    k = nodes_of(space, "transformer.h.0.mlp.c_fc.weight")[0]
    change = here.pin(node_name(space, k), space.strategies[k][layouts[k]].outputs[0])
    assert change.seconds == 0
    assert change.bytes == 0
    assert change.after.decision.schedule == change.before.decision.schedule
    assert here.forbid("transformer.h.0.*", "recompute").seconds == 0


def test_what_is_forbidden_is_not_done():
    here = exploration("gpt2", 0.9)
    again = reruns(here.plan)
    assert again, "under the limit something is recomputed"
    name = min(again)
    change = here.forbid(name, "recompute")
    assert name not in reruns(change.after)
    assert change.after.objective_seconds >= change.before.objective_seconds
    assert accepted(change.after)


def test_pins_hold_together():
    here = exploration()
    first = here.pin("transformer.h.0", "S0")
    second = here.pin("transformer.h.1.mlp", "recompute")
    assert second.before.digest == first.after.digest
    assert second.after.objective_seconds >= first.after.bound_seconds
    left = here.unpin("transformer.h.0")
    assert [pin.target for pin in here.pins] == ["transformer.h.1.mlp"]
    assert left.after.objective_seconds <= second.after.objective_seconds
    with pytest.raises(ExploreError, match=r"'transformer.h.0' is not pinned; pinned are: 'transformer.h.1.mlp'"):
        here.unpin("transformer.h.0")


def test_more_time_searches_on_from_a_plan_that_is_known():
    seen = []
    limit = int(exploration().plan.peak_bytes * 0.7) + session().costs.device.reserve_bytes
    request = PlanRequest(memory=limit, time_limit=1.0, solver="lagrangian", workers=1)
    with Exploration(session(), request, progress=seen.append) as here:
        first = here.pin(MODULE["gpt2"], "recompute").after
        assert first.gap > 1e-3, "what follows is of a plan whose search may go on"
        begun = len(seen)
        longer = here.pin(MODULE["gpt2"], "recompute", time_limit=3.0)
        assert len(seen) > begun
        assert longer.before is first
        assert longer.after.objective_seconds <= first.objective_seconds
        assert longer.after.bound_seconds >= first.bound_seconds
        assert longer.title().startswith("the same pins: ")
        assert (longer.least_seconds, longer.most_seconds) == (0.0, 0.0), "of one optimum"
        begun = len(seen)
        for again in (here.pin(MODULE["gpt2"], "recompute"), here.improve(3.0), here.improve(2.0)):
            assert again.after is longer.after
            assert again.elapsed_seconds < 0.1
        assert len(seen) == begun
        assert here.plan is longer.after


def test_what_ctrl_c_cut_short_is_searched_again(monkeypatch):
    seen, search = [], WarmSolver._whole

    def interrupted(self, *args):
        found = search(self, *args)
        return replace(found, result=replace(found.result, message=Ending.INTERRUPTED))

    limit = int(exploration().plan.peak_bytes * 0.7) + session().costs.device.reserve_bytes
    request = PlanRequest(memory=limit, time_limit=1.0, solver="lagrangian", workers=1)
    with Exploration(session(), request, progress=seen.append) as here:
        monkeypatch.setattr(WarmSolver, "_whole", interrupted)
        short = here.plan
        monkeypatch.setattr(WarmSolver, "_whole", search)
        assert INTERRUPTED in short.record.notes
        assert here.plan is short, "it is the present plan until another one is asked for"
        begun = len(seen)
        whole = here.improve(1.0)
        assert len(seen) > begun, "although it had as much time before"
        assert INTERRUPTED not in whole.after.record.notes
        assert whole.before is short
        assert whole.after.objective_seconds <= short.objective_seconds
        assert whole.after.bound_seconds >= (short.bound_seconds or 0.0)
        assert accepted(whole.after)
        assert here.improve(1.0).after is whole.after


def test_pins_that_were_only_added_or_only_taken_back_are_proven_to_change_the_optimum_in_one_direction():
    here = exploration("gpt2", 0.9)
    plan, options = here.plan, here.plan.decision.predicted
    loose = plan.model_copy(
        update={
            "decision": plan.decision.model_copy(
                update={"predicted": options.model_copy(update={"bound_ns": options.objective_ns // 2})}
            )
        }
    )
    one, other = (Pin(target=name, decision="keep") for name in ("a", "b"))
    added = PinChange((one,), (one,), loose, loose, 0.0, 1.0)
    taken = PinChange((one,), (), loose, loose, 0.0, 1.0)
    both = PinChange((one, other), (other,), loose, loose, 0.0, 1.0)
    half = loose.objective_seconds - loose.bound_seconds
    assert half > 0
    assert (added.least_seconds, added.most_seconds) == (0.0, half)
    assert (taken.least_seconds, taken.most_seconds) == (-half, 0.0)
    assert (both.least_seconds, both.most_seconds) == (-half, half)
    assert "from +0 " in added.notes()[0]


@pytest.mark.parametrize(
    ("target", "decision", "message"),
    [
        ("transformer.h.1.mpl", "keep", r"names no operator, module or parameter.*'transformer.h.1.mlp'"),
        (
            "transformer.h.1.mlp",
            "S7",
            r"pin 'transformer.h.1.mlp S7': nothing is left to transformer.h.1.mlp.*possible",
        ),
        ("transformer.h.1.mlp", "offload", r"nothing is left to .*possible there: .*keep or recompute"),
        (
            "transformer.wte.weight",
            "recompute",
            r"nothing is left to transformer.wte.weight; possible there: placement",
        ),
        ("transformer.h.1.mlp", "spread", r"decision 'spread' is unknown: write keep, recompute, offload"),
        ("transformer.h.1.mlp", "S0,R", r"placement S0,R has 2 entries and mesh 2 has 1 axes: write one per axis"),
    ],
)
def test_what_cannot_be_pinned_is_refused_by_name_and_changes_nothing(target, decision, message):
    here = exploration()
    before = here.plan
    with pytest.raises(ExploreError, match=message):
        here.pin(target, decision)
    assert here.pins == ()
    assert here.plan is before


def test_pins_that_exclude_each_other_are_refused_with_both():
    here = exploration()
    here.pin("transformer.h.0.mlp", "recompute")
    with pytest.raises(ExploreError, match=r"together with 'transformer.h.0(.mlp recompute| keep)'; possible"):
        here.pin("transformer.h.0", "keep")


def test_a_view_is_refused_with_the_operator_whose_storage_it_shows():
    graph = session().graph
    view = next(op for op in graph.operators if op.is_view and graph.values[op.inputs[0]].producer is not None)
    with pytest.raises(ExploreError, match="is a view and decides nothing: pin "):
        nodes_of(session().space, view.identity)


CONTRARY = {"recompute": ("keep", False), "keep": ("recompute", False), "S0": ("S0", True)}


@pytest.mark.parametrize(
    ("target", "decision"),
    [
        (MODULE["gpt2"], "recompute"),
        (MODULE["gpt2"], "keep"),
        ("transformer.h.0.mlp.c_fc.weight", "S0"),
        ("transformer.h.1.ln_1/forward/aten.native_layer_norm.default/0", "S0"),
    ],
)
def test_the_checker_finds_pins_that_a_plan_does_not_keep(target, decision):
    here = exploration()
    plan = here.pin(target, decision).after
    assert [str(pin) for pin in plan.decision.options.pins] == [f"{target} {decision}"]
    assert accepted(plan)
    other, forbids = CONTRARY[decision]
    options = plan.decision.options.model_copy(update={"pins": (Pin(target=target, decision=other, forbids=forbids),)})
    lying = plan.model_copy(update={"decision": plan.decision.model_copy(update={"options": options})})
    with pytest.raises(PlanError, match=r"does not keep its pins: "):
        accepted(lying)


def test_an_exploration_is_a_table_of_the_plans_that_pins_led_to(tmp_path):
    here = Exploration(session(), PlanRequest(time_limit=10))
    assert here.rows() == []
    assert "not planned yet" in str(here)
    here.pin(MODULE["gpt2"], "recompute")
    here.unpin()
    names = [row["name"] for row in here.rows()]
    assert names == ["at first", f"{MODULE['gpt2']} recompute", f"no longer {MODULE['gpt2']} recompute"]
    assert len(here.to_pandas()) == 3
    assert "at first" in here._repr_html_()
    here.save(tmp_path / "here.json")
    here.close()


def test_placements_may_be_written_as_torch_writes_them():
    assert pin_of("a", "Shard(0)", (2,)) == pin_of("a", ["S(0)"], (2,)) == Pin(target="a", decision="S0")
    forbidden = Pin(target="a", decision="S1,R", forbids=True)
    assert pin_of("a", "Shard(dim=1), Replicate()", (2, 2), forbids=True) == forbidden


def test_a_pattern_names_several_modules_and_a_module_all_of_its_operators():
    space = session().space
    one = set(nodes_of(space, "transformer.h.0.mlp"))
    both = set(nodes_of(space, "transformer.h.*.mlp"))
    assert one < both == one | set(nodes_of(space, "transformer.h.1.mlp"))
    assert set(nodes_of(space, "transformer.h.0.mlp.c_fc")) < one


def test_the_problems_around_a_problem_keep_its_pins():
    here = session()
    built = here.problem(PlanRequest(memory=None))
    pins = allowed_by(
        here.space,
        built,
        [pin_of("transformer.h.0.mlp", "recompute", (2,)), pin_of("transformer.h.1", "S0", (2,))],
    )
    around = pinned(built, pins)
    assert around.unlimited is None, "without reruns there is no decision"
    assert pinned(built, {}) is built
    for problem in (around, *(build() for build in around.restrictions)):
        for i, left in pins.items():
            size = problem.problem.nodes[i].size
            allowed = ~problem.problem.nodes[i].forbidden
            assert not (allowed & ~left.flags(size, len(problem.modes.get(i, ())))).any()
    free = exploration().solution.decision
    assert built.contains(free)
    assert not around.contains(free)


def test_modes_are_numbered_keep_first_then_reruns_then_offload():
    assert [holding_of(mode, 2) for mode in range(4)] == [
        Holding.KEEP,
        Holding.RECOMPUTE,
        Holding.RECOMPUTE,
        Holding.OFFLOAD,
    ]
    left = Allowed(np.array([True, False]), frozenset({Holding.OFFLOAD}))
    assert left.flags(6, 1).tolist() == [False, False, False, False, True, False]


@pytest.mark.bench
def test_a_plan_after_one_pin_takes_a_fifth_of_the_time_of_the_first(benchmark):
    """GPT-2 with 12 layers; all measured in one run, the longest of three plans counts."""
    started = time.perf_counter()
    reference = ModelReference("hf:gpt2", batch=4, sequence=256, dropout=0.0)
    with api.explore(reference, cluster=CLUSTER, mesh=(2,)) as here:
        assert here.plan.gap <= 1e-4
        first = time.perf_counter() - started
        pins = iter([("transformer.h.3.mlp", "recompute"), ("transformer.h.2", "S0"), ("transformer.h.7", "R")])
        benchmark.pedantic(lambda: here.pin(*next(pins)), rounds=3)
    assert all(change.seconds >= 0 and change.after.gap <= 5e-2 for change in here.history)
    longest = max(change.elapsed_seconds for change in here.history)
    benchmark.extra_info["share_of_first"] = longest / first
    assert longest <= 0.2 * first
