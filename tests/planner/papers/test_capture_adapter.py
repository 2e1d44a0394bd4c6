"""CAPTURE's plans of layers: what they decide, what they promise and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from support.steps.planned_steps import step_reference

from formulations.capture.replay import StageReplay
from formulations.galvatron.costs import CostModel
from formulations.galvatron.strategies import Dimension, LayerStrategy, Level
from formulations.layers.layer import LayerChain
from formulations.layers.pipeline_schedule import Schedule
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.graph.optimizers import optimizer_named
from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan
from planner.layers.plan.request import LayerRequest
from planner.layers.profiles.folding import model_layers
from planner.machine.cluster import ClusterSpec, load_cluster
from planner.papers.capture.adapter import plan_with_capture
from planner.papers.galvatron.adapter import device_links

PLENTY = 10**9
TIME = {"objective": "time"}


def cluster_of(devices_per_node: int = 8) -> ClusterSpec:
    cluster = load_cluster("titan-rtx-2x8-pcie")
    return cluster.model_copy(update={"devices_per_node": devices_per_node, "nodes": 16 // devices_per_node})


@cache
def chain_of(name: str) -> LayerChain:
    return model_layers(step_reference(name), cluster_of())


def planned(name: str = "gpt2", devices: int = 4, tensor_bytes: int = PLENTY, batch: int = 8, **more) -> LayerPlan:
    options = {"as_published": False, "search_batch": False, "cluster": cluster_of()} | more
    request = LayerRequest(
        formulation="capture",
        reference=replace(step_reference(name), batch=batch),
        devices=devices,
        tensor_bytes=tensor_bytes,
        optimizer=optimizer_named("adamw"),
        time_limit=10.0,
        **options,
    )
    return plan_with_capture(request, chain_of(name))


def replayed(plan: LayerPlan) -> tuple[int, ...]:
    """Bytes of every stage, by the replay of a plan whose stages all run alike."""
    chain = chain_of("vit")
    layer = plan.layers[0]
    dimension = Dimension.TENSOR if layer.tensor_parallel > 1 else Dimension.DATA
    levels = (Level(dimension, layer.devices),) if layer.devices > 1 else ()
    schedule = Schedule.GPIPE if plan.schedule == "gpipe" else Schedule.ONE_F_ONE_B
    costs = CostModel(device_links(cluster_of()), states_per_parameter=4)
    borders = tuple(range(len(chain) + 1))
    replay = StageReplay(chain=chain, borders=borders, model=costs, schedule=schedule, micro_batches=plan.micro_batches)
    partition = [len(stage.layers) for stage in plan.stages]
    return replay.run(partition, LayerStrategy(levels, False), plan.model.batch // plan.micro_batches)


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_exact_plans_hold_no_more_than_published_ones_and_may_be_as_fast(name: str, devices: int) -> None:
    published = planned(name, devices, as_published=True)
    held = max(published.record.stage_peak_bytes)
    least, exact = planned(name, devices), planned(name, devices, held, given=TIME)
    for plan in (published, least, exact):
        check_layer_plan(plan)
        assert plan.devices == devices
        assert [layer.name for layer in plan.layers] == [layer.name for layer in chain_of(name).layers]
        assert max(plan.record.stage_peak_bytes) <= held
    assert exact.record.objective_seconds <= published.record.objective_seconds
    assert exact.record.bound_seconds == exact.record.objective_seconds
    assert least.record.bound_bytes == max(least.record.stage_peak_bytes)
    assert least.record.bound_seconds is published.record.bound_seconds is published.record.bound_bytes is None


def test_peaks_are_those_of_the_replay() -> None:
    alike = 0
    for devices in (1, 2, 4, 8):
        for as_published in (False, True):
            plan = planned("vit", devices, as_published=as_published)
            if len({(layer.data_parallel, layer.tensor_parallel) for layer in plan.layers}) == 1:
                assert plan.record.stage_peak_bytes == replayed(plan)
                alike += 1
    assert alike >= 4


def _or_none(tensor_bytes: int) -> LayerPlan | None:
    try:
        return planned(tensor_bytes=tensor_bytes, given=TIME)
    except InfeasibleError:
        return None


def test_less_memory_makes_more_stages_until_nothing_fits() -> None:
    plans = [planned(given=TIME)]
    while (best := _or_none(max(plans[-1].record.stage_peak_bytes) - 1)) is not None:
        plans.append(best)
    least = max(plans[-1].record.stage_peak_bytes)
    with pytest.raises(InfeasibleError, match=f"and {least / 1024:.2f} KiB at the least, in "):
        planned(tensor_bytes=least - 1)
    seconds = [plan.record.objective_seconds for plan in plans]
    assert len(seconds) > 2
    assert seconds == sorted(seconds)
    checkpointed = [{layer.checkpoint for layer in plan.layers} for plan in plans]
    assert checkpointed == sorted(checkpointed, key=lambda kinds: kinds == {True})  # all layers, once nothing else fits
    assert checkpointed[-1] == {True}
    with pytest.raises(InfeasibleError, match=r"at the least, in .* use more devices"):
        planned(tensor_bytes=least - 1, as_published=True)


def test_layers_that_share_a_parameter_run_alike() -> None:
    for devices in (2, 4, 8):
        for as_published in (False, True):
            first, *_, last = planned("gpt2", devices, as_published=as_published).layers
            assert (first.name, last.name) == ("embedding", "head")
            assert first.model_copy(update={"name": "head"}) == last


def test_a_stage_stays_inside_a_node() -> None:
    plan = planned("vit", 8, cluster=cluster_of(4))
    assert all(layer.devices <= 4 for layer in plan.layers)
    with pytest.raises(
        InfeasibleError, match=r"4 layers .* on 16 devices: stages inside a node.* at most 2 devices.*at least 8"
    ):
        planned("vit", 16, cluster=cluster_of(2))


def test_the_batch_is_not_decided() -> None:
    with pytest.raises(PlanError, match="does not search over batches"):
        planned(search_batch=True)
