"""From a reference to a checked plan: certificates, limits, refusals, determinism, explanations."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
from support.steps.planned_steps import random_plan, step_reference
from support.tiers import only, slow

from formulations.problem.solution import SolveOptions, SolveResult, Status
from formulations.solvers import solve
from formulations.solvers.protocol.registry import method_of
from formulations.step.solving.second_bound import SecondBound
from formulations.step.training_step import StepDecision
from planner import api
from planner.common.infeasibility import InfeasibleError
from planner.common.units import format_bytes
from planner.fits import fits_report
from planner.graph.optimizers import OPTIMIZERS
from planner.layers.plan.document import LayerPlan, LayerSettings, StagePlan
from planner.machine.cluster import load_cluster
from planner.plan.document import PlanError, canonical_json, schedule_of, verify_plan
from planner.replay.checker import ViolationKind
from planner.session import PlanningSession, PlanRequest, session_of

CLUSTER = "a100-8-nvlink"
NEAR = PlanRequest(time_limit=20, gap=0.01)
"""For tests that need a plan, but no proof that it is the best."""


@cache
def session(name: str, mesh: tuple[int, ...]) -> PlanningSession:
    return PlanningSession(step_reference(name), CLUSTER, mesh)


def usable(session: PlanningSession, tensors: int) -> int:
    """Memory whose part for tensors is ``tensors`` bytes."""
    return tensors + session.costs.device.reserve_bytes


def plans_within(session: PlanningSession, memories: list[int], request: PlanRequest):
    """Per limit a plan, or the reason why there is none."""
    found = []
    for memory in memories:
        try:
            found.append(session.plan(replace(request, memory=memory)))
        except InfeasibleError as error:
            found.append(error)
    return found


@pytest.mark.parametrize(
    ("name", "mesh"), [("gpt2", (2,)), slow("gpt2", (2, 2)), slow("conv_net", (2,)), ("conv_net", (2, 2))]
)
def test_a_plan_is_certified_and_holds(name, mesh):
    here = session(name, mesh)
    plan = here.plan(NEAR)
    certificate = plan.record.certificate
    assert certificate.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert plan.bound_seconds <= plan.objective_seconds
    (second,) = certificate.cross_checks
    assert second.bound_ns is not None
    assert second.bound_ns <= plan.decision.predicted.bound_ns
    assert method_of(second.solver) != certificate.method
    again = session_of(plan)
    report = verify_plan(
        plan,
        again.traced.graph,
        again.fingerprints,
        seconds=again.instruction_costs,
        allowed=again.allowed_strategies,
    )
    assert report.peak_bytes == plan.peak_bytes


@pytest.mark.parametrize("formulation", ["checkmate", "alpa_then_checkmate"])
def test_layouts_to_start_from_are_found_whatever_the_time_limit(formulation):
    built = session("gpt2", (2,)).problem(PlanRequest(formulation=formulation, time_limit=1e-3))
    assert solve(built.problem, "greedy", SolveOptions(time_limit=60.0)).choices is not None


@pytest.mark.slow
def test_more_memory_never_costs_more_and_recomputation_reaches_lower():
    here = session("gpt2", (2,))
    free = here.plan(PlanRequest(time_limit=5))
    memories = [usable(here, int(free.peak_bytes * share)) for share in (1.0, 0.97, 0.94)]
    joint = plans_within(here, memories, PlanRequest(time_limit=2))
    alone = plans_within(here, memories, PlanRequest(formulation="sharding", time_limit=2))
    bounds = [plan.bound_seconds for plan in joint if not isinstance(plan, InfeasibleError)]
    assert joint[0].objective_seconds == pytest.approx(free.objective_seconds, rel=1e-9)
    assert len(bounds) >= 2
    for tighter, looser in zip(joint[1:], joint, strict=False):
        if not isinstance(tighter, InfeasibleError):
            assert tighter.objective_seconds >= looser.bound_seconds
    for with_recompute, without in zip(joint, alone, strict=True):
        if not isinstance(without, InfeasibleError):
            assert with_recompute.bound_seconds <= without.objective_seconds


@pytest.mark.parametrize("name", ["conv_net", slow("gpt2")])
def test_too_little_memory_says_the_minimum_that_then_fits(name):
    here = session(name, (2,))
    smallest = usable(here, 2**16)
    with pytest.raises(InfeasibleError, match="too little: every plan of this formulation needs at least") as refused:
        here.plan(PlanRequest(memory=smallest, time_limit=6))
    message = str(refused.value)
    assert "it binds at" in message
    assert "alive" in message
    fits = int(re.search(r"--memory (\d+)MiB fits", message)[1]) * 2**20
    assert here.plan(replace(NEAR, memory=fits)).peak_bytes <= fits


def test_a_memory_that_the_reserve_uses_up_is_refused():
    here = session("gpt2", (2,))
    with pytest.raises(ValueError, match="leaves nothing for tensors"):
        here.plan(PlanRequest(memory=here.costs.device.reserve_bytes))


@pytest.mark.slow
def test_equal_requests_give_equal_decisions():
    request = PlanRequest(time_limit=20)
    first = PlanningSession(step_reference("conv_net"), CLUSTER, (2,)).plan(request)
    second = PlanningSession(step_reference("conv_net"), CLUSTER, (2,)).plan(request)
    assert first.record.certificate.status is Status.OPTIMAL
    assert canonical_json(first.decision) == canonical_json(second.decision)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"formulation": "kiwi"}, "model formulation 'kiwi' is not known"),
        ({"solver": "magic"}, "magic"),
        ({"time_limit": -1.0}, "time_limit"),
    ],
)
def test_bad_requests_name_the_remedy(change, message):
    with pytest.raises(ValueError, match=message):
        session("conv_net", (2,)).plan(PlanRequest(**change))


def test_unknown_optimizer():
    with pytest.raises(ValueError, match="'adam' is not known; choose one of adamw, sgd, sgd_momentum, adamw_mixed"):
        PlanningSession(step_reference("conv_net"), CLUSTER, (2,), "adam")


@pytest.mark.parametrize("name", ["conv_net", slow("gpt2")])
def test_an_explanation_says_what_moves_what_is_alive_and_what_memory_is_worth(name):
    here = session(name, (2,))
    free = here.plan(NEAR)
    tight = here.plan(replace(NEAR, memory=usable(here, int(free.peak_bytes * 0.97))))
    explained = api.explain(tight, time_limit=2)
    text = str(explained)
    for heading in ("Costliest reshardings", "Recomputed", "Alive at the peak", "Price of memory"):
        assert heading in text
    half = format_bytes(tight.decision.options.limit_bytes // 2)
    assert f"{half} more: -" in text or f"{half} more: +0" in text
    assert re.search(rf"{half} less: (\+|.*needs)", text)
    assert "<h4>Recomputed</h4>" in explained._repr_html_()


def test_a_device_that_is_full_has_no_more_to_price():
    here = session("gpt2", (2,))
    device = here.cluster.device.memory_bytes
    plan = here.plan(replace(NEAR, memory=device))
    prices = next(section.lines for section in api.explain(plan, time_limit=1).sections if "Price" in section.title)
    assert prices[0].startswith("1.00 GiB less: ")
    assert prices[1] == "1.00 GiB more: the device has no more"
    nearly = here.plan(replace(NEAR, memory=device - 2**29))
    prices = next(section.lines for section in api.explain(nearly, time_limit=1).sections if "Price" in section.title)
    assert prices[1].startswith("512.00 MiB more: ")


def test_a_plan_after_ctrl_c_says_so():
    here = session("gpt2", (2,))
    solved = here.solve(NEAR)
    interrupted = replace(solved, result=replace(solved.result, message="interrupted"))
    notes = here.certify(NEAR, interrupted).record.notes
    assert [note for note in notes if note not in here.certify(NEAR, solved).record.notes] == [
        "interrupted: the search ended before its time limit, so its gap may be wider for that"
    ]


def test_fits_brackets_the_plans():
    report = api.fits(step_reference("gpt2"), cluster=CLUSTER, mesh=(2,))
    kept, floor, kept_divided, floor_divided = (row.peak_bytes for row in report.rows)
    assert floor_divided < kept_divided < kept
    assert floor < kept
    assert all(row.fits for row in report.rows)
    here = session("gpt2", (2,))
    assert floor_divided <= here.plan(NEAR).peak_bytes <= kept


@pytest.mark.slow
def test_host_memory_is_planned_kept_and_written():
    cluster = load_cluster(CLUSTER)
    link = cluster.host_link.model_copy(update={"latency_seconds": 1e-9, "bandwidth": 1e13})
    cluster = cluster.model_copy(update={"host_link": link})  # in a step this small only free copies are worth it
    here = PlanningSession(step_reference("gpt2"), cluster, (2,))
    free = here.plan(PlanRequest(formulation="sharding", solver="greedy", time_limit=1))
    tight = PlanRequest(usable(here, int(free.peak_bytes * 0.9)), "kiwi_offload", time_limit=2)
    offloaded = here.plan(replace(tight, host_memory=2**30, time_limit=10))  # it ends earlier, with a proof
    host = offloaded.decision.predicted.host
    assert 0 < host.peak_bytes <= offloaded.decision.options.host_memory_bytes == 2**30
    assert {"peak host memory", "host memory limit"} <= dict(offloaded.rows()).keys()
    (row,) = api.compare(tight=offloaded).rows()
    assert row["offloaded_bytes"] == host.offloaded_bytes
    assert "offloaded" not in str(api.compare(free=free))
    text = str(api.explain(offloaded, cluster=cluster, time_limit=1))
    assert f"at most {format_bytes(host.peak_bytes)} of host memory at once" in text
    assert "iB less: " in text

    nothing_waits = here.plan(replace(tight, host_memory=0))
    assert nothing_waits.decision.predicted.host.offloaded_bytes == 0
    schedule = schedule_of(offloaded, here.traced.graph)
    refused = here.replay(schedule, host_limit=host.peak_bytes - 1).violations
    assert [violation.kind for violation in refused] == [ViolationKind.OVER_HOST_LIMIT]


def test_memory_may_be_a_text():
    step = {"cluster": "a100-8-nvlink", "mesh": (2,)}
    texts = [api.fits(step_reference("gpt2"), **step, memory=size).limit for size in ("4GiB", 4 * 2**30)]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="memory: 'much' is no size; write 4GiB"):
        api.plan(step_reference("gpt2"), **step, memory="much")
    with pytest.raises(ValueError, match="memories: 'much' is no size; write 4GiB"):
        api.sweep(step_reference("gpt2"), cluster="a100-8-nvlink", meshes=[(2,)], memories=["much"])


def test_host_memory_below_nothing_is_refused():
    with pytest.raises(PlanError, match="host memory -1 bytes: give 0 or more"):
        PlanRequest(host_memory=-1)


@pytest.mark.parametrize("optimizer", only(("adamw_mixed",), OPTIMIZERS))
def test_plans_and_fits_know_every_optimizer(optimizer):
    here = PlanningSession(replace(step_reference("gpt2"), dtype="bfloat16"), CLUSTER, (2,), optimizer)
    whole = StepDecision((0,) * len(here.space.nodes), {})
    kept = fits_report(here.traced.graph, 2, here.optimizer).rows[0].peak_bytes
    assert kept == here.replay(here.schedule(whole)).peak_bytes
    plan = here.plan(replace(NEAR, formulation="sharding"))
    assert plan.decision.options.optimizer == optimizer
    assert plan.peak_bytes <= kept
    verify_plan(plan, here.traced.graph, here.fingerprints, seconds=here.instruction_costs)


@pytest.mark.parametrize(("dtype", "optimizer"), [("bfloat16", "adamw_mixed"), ("float32", "adamw")])
def test_without_an_optimizer_16_bits_are_trained_in_32(dtype, optimizer):
    assert PlanningSession(replace(step_reference("mlp"), dtype=dtype), CLUSTER, (2,)).optimizer.name == optimizer


def test_plans_side_by_side(tmp_path):
    here = session("mlp", (2,))
    one, two = here.plan(NEAR), here.plan(replace(NEAR, formulation="sharding"))
    table = api.compare(joint=one, sharding=two)
    assert "joint" in str(table)
    assert "sharding" in table._repr_html_()
    assert table.notes() == []
    one.save(tmp_path / "one.json")
    assert api.load(tmp_path / "one.json") == one
    assert one.to_pandas().loc["status", "value"] == str(one.record.certificate.status)
    assert [row["formulation"] for row in table.rows()] == ["kiwi_chain", "sharding"]
    assert table.rows()[0]["limit_bytes"] == one.decision.options.limit_bytes
    layers = LayerPlan(
        version=1,
        model=one.decision.model.model_copy(update={"batch": 1024}),
        devices=2,
        stages=(StagePlan(layers=(LayerSettings(name="whole", data_parallel=2),)),),
    )
    layers.save(tmp_path / "layers.json")
    assert api.load(tmp_path / "layers.json") == layers
    assert layers.to_pandas().loc["whole", "data_parallel"] == 2
    row = api.compare(operators=one, layers=layers).rows()[1]
    assert (row["stages"], row["seconds"], row["peak_bytes"]) == (1, None, None)
    assert api.compare(operators=one, layers=layers).notes() != []


def test_a_mesh_must_divide_the_cluster_and_memory_must_exist():
    with pytest.raises(ValueError, match="mesh 3 has 3 ranks, which do not divide the 8 devices"):
        PlanningSession(step_reference("conv_net"), CLUSTER, (3,))
    here = session("conv_net", (2,))
    with pytest.raises(ValueError, match="give at most that"):
        here.plan(PlanRequest(memory=2**50))


def test_fits_counts_the_updates():
    here = session("mlp", (2,))
    report = fits_report(here.traced.graph, 2, here.optimizer)
    whole = StepDecision((0,) * len(here.space.nodes), {})
    assert report.rows[0].peak_bytes == here.replay(here.schedule(whole)).peak_bytes


def test_a_second_bound_above_the_cost_refuses_the_plan(monkeypatch):
    def too_high(self: SecondBound) -> SolveResult:
        found = true_result(self)
        return replace(found, bound=10**18)

    true_result = SecondBound.result
    monkeypatch.setattr(SecondBound, "result", too_high)
    with pytest.raises(PlanError, match="below the bound of"):
        session("mlp", (2,)).plan(NEAR)


def test_where_the_second_method_has_no_bound_the_plan_says_so(monkeypatch):
    true_result = SecondBound.result
    monkeypatch.setattr(SecondBound, "result", lambda self: replace(true_result(self), bound=None))
    plan = session("mlp", (2,)).plan(NEAR)
    assert dict(plan.rows())["second bound"] == "none: the bound is from one method"


@pytest.mark.slow
def test_a_search_ends_at_the_gap_that_was_asked_for():
    """With an hour for a proof it would outlast this test's own limit."""
    here = session("gpt2", (2, 2))
    free = here.plan(PlanRequest(time_limit=5))
    tight = usable(here, int(0.7 * free.peak_bytes))
    plan = here.plan(PlanRequest(tight, time_limit=3600.0, gap=0.9))
    assert plan.gap <= 0.9


@pytest.mark.parametrize("gap", [-0.1, 1.0, float("nan")])
def test_a_gap_is_a_share_of_the_cost(gap):
    with pytest.raises(PlanError, match=f"gap {gap}: give a share"):
        PlanRequest(gap=gap)


def test_an_unknown_formulation_is_refused_with_all_there_are():
    with pytest.raises(ValueError, match=r"'kiwi' is not known; choose one of sharding.*kiwi_chain.*osdp.*capture"):
        api.plan(step_reference("conv_net"), cluster=CLUSTER, mesh=(2,), formulation="kiwi")


def test_plans_are_read_and_written_by_names_as_strings(tmp_path):
    plan = random_plan("mlp", (2,), 0)
    api.save(plan, str(tmp_path / "plan.json"))
    assert api.load(str(tmp_path / "plan.json")).digest == plan.digest
