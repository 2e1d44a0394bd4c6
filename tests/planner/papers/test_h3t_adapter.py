"""H3T on real models: the plan's settings are its switches, and what does not fit is said."""

from __future__ import annotations

import pytest

from formulations.h3t.costs import H3tMachine, Link, h3t_step
from formulations.h3t.exact import least_memory
from formulations.h3t.segments import segment_tables
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.graph.optimizers import optimizer_named
from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.request import LayerRequest
from planner.layers.presets.paper_models import paper_layers
from planner.machine.cluster import load_cluster
from planner.models.references import ModelReference
from planner.papers.h3t.adapter import h3t_machine, plan_with_h3t

CLUSTER = load_cluster("rtx-2080ti-8-pcie")
CHAIN = paper_layers("H3T-1.8B", CLUSTER)


def request(tensor_bytes, *, as_published=False, batch=16, search_batch=False):
    return LayerRequest(
        formulation="h3t",
        reference=ModelReference("hf:bert-large-uncased", batch=batch),
        cluster=CLUSTER,
        devices=8,
        tensor_bytes=tensor_bytes,
        optimizer=optimizer_named("adamw"),
        as_published=as_published,
        search_batch=search_batch,
        time_limit=30.0,
    )


@pytest.mark.parametrize("as_published", [False, True])
def test_a_plan_keeps_its_promises(as_published):
    plan = plan_with_h3t(request(6 * 10**9, as_published=as_published), CHAIN)
    check_layer_plan(plan)
    assert [layer.name for layer in plan.layers] == [layer.name for layer in CHAIN.layers]
    assert plan.record.stage_peak_bytes[0] <= plan.record.tensor_bytes
    assert (plan.record.bound_seconds is None) == as_published
    assert not as_published or plan.record.solver == "pruned dynamic program"
    assert any("not enforced" in note for note in plan.record.notes)
    for layer in plan.layers:
        assert layer.offload_optimizer != layer.offload_parameters


@pytest.mark.slow
def test_less_memory_costs_time_and_turns_switches_on():
    roomy, tight = (plan_with_h3t(request(limit, batch=128), CHAIN) for limit in (40 * 10**9, 4 * 10**9))
    assert tight.record.objective_seconds > roomy.record.objective_seconds
    on = [sum(layer.checkpoint for layer in plan.layers) for plan in (roomy, tight)]
    assert on[0] < on[1]


def test_a_limit_below_the_least_is_refused_by_naming_it_and_why():
    step = h3t_step(CHAIN, h3t_machine(CLUSTER, 8), 16, 0)
    least = least_memory(segment_tables(step))
    plan_with_h3t(request(least), CHAIN)
    with pytest.raises(InfeasibleError, match=r"at least .* with all switches on: one layer's activations"):
        plan_with_h3t(request(least - 1), CHAIN)


def test_what_cannot_be_shared_or_searched_is_refused():
    with pytest.raises(PlanError, match="batch 12 on 8 devices"):
        plan_with_h3t(request(10**10, batch=12), CHAIN)
    with pytest.raises(PlanError, match="does not search over batches"):
        plan_with_h3t(request(10**10, search_batch=True), CHAIN)


def test_devices_without_links_of_their_own_share_the_hosts():
    assert not h3t_machine(CLUSTER, 8).device_link
    assert h3t_machine(load_cluster("a100-8-nvlink"), 8).device_link


def test_one_device_neither_gathers_nor_scatters():
    link = Link(1e-5, 1e-10)
    machine = H3tMachine(devices=1, between=link, host=link, device_link=True, update_seconds_per_byte=0.0)
    (layer, *_) = h3t_step(CHAIN, machine, 2, 10**10).layers
    assert (layer.gather, layer.scatter, layer.update) == (0, 0, 0)
    assert layer.shard_bytes == layer.parameter_bytes
