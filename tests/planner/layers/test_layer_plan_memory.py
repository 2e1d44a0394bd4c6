"""What torch's engine is predicted to hold, added up by hand; tests/runtime/layers/test_layer_random.py measures it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from formulations.layers.layer import LayerChain, LayerProfile, ProfileSource
from planner.common.plan_error import PlanError
from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan, LayerRecord, LayerSettings, PlannedMachine, StagePlan
from planner.layers.plan.memory import engine_peaks, plan_profiles
from planner.plan.decision import PlannedModel

PARAMETERS, GIVEN, SAVED, BACKWARD, BATCH = 1200, 10, 100, 7, 4
STATES = 3
"""The parameter and AdamW's two moments."""


def profile(name: str, **more: int) -> LayerProfile:
    sizes = {"input_bytes": GIVEN, "output_bytes": GIVEN, "saved_bytes": SAVED, "parameter_bytes": PARAMETERS}
    return LayerProfile(
        name=name,
        kind=name,
        forward_workspace_bytes=5,
        backward_workspace_bytes=BACKWARD,
        forward_seconds=0.0,
        backward_seconds=0.0,
        bytes_source=ProfileSource.PRESET,
        seconds_source=ProfileSource.PRESET,
        **{**sizes, **more},
    )


def plan_of(*stages: list[LayerSettings], devices: int = 1, **options) -> LayerPlan:
    model = PlannedModel(source="hf:gpt2", batch=BATCH, sequence=16, dtype="float32", seed=0)
    plan = LayerPlan(
        model=model, devices=devices, stages=tuple(StagePlan(layers=tuple(stage)) for stage in stages), **options
    )
    check_layer_plan(plan)
    return plan


def peaks(plan: LayerPlan, **more: int):
    return engine_peaks(plan, [profile(layer.name, **more) for layer in plan.layers])


def test_one_device_gathers_and_reduces_all_the_same():
    plan = plan_of([LayerSettings(name="first"), LayerSettings(name="second")])
    (peak,) = peaks(plan)
    assert peak.moment == "backward of first"
    assert peak.parts == {
        "states": 2 * STATES * PARAMETERS + BATCH * GIVEN,
        "activations": BATCH * SAVED,
        "workspace": BATCH * BACKWARD,
        "copies": PARAMETERS,
        "gradients": 2 * PARAMETERS,
        "reduction": PARAMETERS,
        "pipeline": 0,
    }
    assert peak.nbytes == sum(peak.parts.values())


def test_with_large_activations_the_last_backward_is_the_worst_moment():
    plan = plan_of([LayerSettings(name="first"), LayerSettings(name="second", checkpoint=True)])
    (peak,) = peaks(plan, saved_bytes=10_000)
    assert peak.moment == "backward of second"
    assert peak.activations == BATCH * (10_000 + GIVEN)
    assert peak.workspace == BATCH * (BACKWARD + 10_000)
    assert (peak.copies, peak.gradients, peak.reduction) == (PARAMETERS, PARAMETERS, 0)


def test_sharded_layers_hold_a_part_and_gather_the_next_one_meanwhile():
    shards = {"data_parallel": 2, "sharding": "zero3"}
    layers = [LayerSettings(name="first", **shards), LayerSettings(name="second", **shards, slices=4)]
    (peak,) = peaks(plan_of(layers, devices=2), saved_bytes=10_000)
    assert peak.moment == "backward of second"
    assert peak.states == 2 * STATES * PARAMETERS // 2 + BATCH // 2 * GIVEN
    assert peak.copies == PARAMETERS // 4 + PARAMETERS  # a slice, and the buffer of the first layer
    gathered_once = [layer.model_copy(update={"sharding": "zero2"}) for layer in layers]
    (kept,) = peaks(plan_of(gathered_once, devices=2), saved_bytes=10_000)
    assert kept.moment == "forward of second"
    assert kept.copies == 2 * PARAMETERS + PARAMETERS // 4  # and the buffer of a slice


@pytest.mark.parametrize(("checkpoint", "fetched"), [(False, BATCH * 10_000 // 4), (True, BATCH * 1000)])
def test_offloaded_activations_are_fetched_for_one_operator_and_on_cuda_for_the_next(checkpoint: bool, fetched: int):
    """Under a checkpoint the input alone is offloaded, and the rest is computed again."""
    layers = [LayerSettings(name="first"), LayerSettings(name="second", offload_hidden=True, checkpoint=checkpoint)]
    found = {}
    for device in ("cpu", "cuda", None):
        machine = None if device is None else PlannedMachine(cluster="a cluster", device=device)
        plan = plan_of(layers, machine=machine)
        (found[device],) = peaks(plan, saved_bytes=10_000, input_bytes=1000)
        assert found[device].moment == "backward of second"
    again = BATCH * 10_000 if checkpoint else 0
    assert found["cpu"].workspace == found[None].workspace == BATCH * BACKWARD + again + fetched
    assert found["cuda"].workspace == found["cpu"].workspace + fetched


def test_gradients_wait_whole_for_the_last_micro_batch():
    shards = {"data_parallel": 2, "sharding": "zero3"}
    layers = [LayerSettings(name="first", **shards), LayerSettings(name="second", **shards)]
    once, twice = (peaks(plan_of(layers, devices=2, micro_batches=k), saved_bytes=10_000)[0] for k in (1, 2))
    assert (once.moment, twice.moment) == ("backward of second", "backward of second")
    assert once.gradients == PARAMETERS
    assert twice.gradients == 2 * PARAMETERS + PARAMETERS // 2


def test_a_pipeline_has_buffers_for_every_micro_batch_of_the_step():
    stages = [[LayerSettings(name="first")], [LayerSettings(name="second")]]
    for schedule, in_flight in (("1f1b", (2, 1)), ("gpipe", (4, 4))):
        plan = plan_of(*stages, devices=2, micro_batches=4, schedule=schedule)
        first, second = peaks(plan, saved_bytes=10_000)
        assert [first.activations, second.activations] == [count * 10_000 for count in in_flight]
        assert first.pipeline == (4 + in_flight[0]) * GIVEN
        assert second.pipeline == 2 * 4 * GIVEN + in_flight[1] * 5


def test_layers_with_a_common_parameter_keep_it_gathered():
    plan = plan_of([LayerSettings(name="first"), LayerSettings(name="second")])
    tied = [profile("first"), replace(profile("second"), parameter_bytes=0, borrowed_parameter_bytes=PARAMETERS)]
    (peak,) = engine_peaks(plan, tied)
    assert peak.moment == "backward of first"
    assert peak.states == STATES * PARAMETERS + BATCH * GIVEN
    assert (peak.copies, peak.gradients) == (PARAMETERS, 3 * PARAMETERS)  # both parts of the gradient, and their sum
    apart = plan_of([LayerSettings(name="first")], [LayerSettings(name="second")], devices=2, micro_batches=2)
    first, second = engine_peaks(apart, tied)
    assert first.states - BATCH * GIVEN == second.states == STATES * PARAMETERS


def test_the_backward_of_the_loss_has_no_copy_and_no_gradient():
    plan = plan_of([LayerSettings(name="first"), LayerSettings(name="second")])
    loss, late = 9_000, 50
    more = {"backward_workspace_bytes": loss, "late_workspace_bytes": late, "late_fixed_workspace_bytes": 0}
    head = replace(profile("second"), **more)
    (peak,) = engine_peaks(plan, [profile("first"), head])
    assert (peak.moment, peak.workspace) == ("backward of the loss", BATCH * loss)
    assert (peak.copies, peak.gradients, peak.reduction) == (0, 0, 0)
    tied = replace(head, parameter_bytes=0, borrowed_parameter_bytes=PARAMETERS)
    assert engine_peaks(plan, [profile("first"), tied])[0].copies == 0
    kept = plan_of(
        [LayerSettings(name=name, sharding="zero2", data_parallel=2) for name in ("first", "second")], devices=2
    )
    assert engine_peaks(kept, [profile("first"), head])[0].copies == 2 * PARAMETERS
    (small,) = engine_peaks(plan, [profile("first"), replace(head, backward_workspace_bytes=late, saved_bytes=9_000)])
    assert (small.moment, small.workspace, small.copies) == ("backward of second", BATCH * late, PARAMETERS)


def test_the_largest_gradient_lies_beside_those_of_earlier_micro_batches():
    plan = plan_of([LayerSettings(name="first"), LayerSettings(name="second")], micro_batches=2)
    for largest in (100, PARAMETERS):
        (peak,) = peaks(plan, saved_bytes=10_000, largest_parameter_bytes=largest)
        assert (peak.moment, peak.gradients) == ("backward of second", 2 * PARAMETERS + largest)


def test_profiles_are_found_by_name_and_by_place():
    plan = plan_of([LayerSettings(name=name) for name in ("embedding", "h.0.attn", "h.0.mlp", "h.1", "head")])
    blocks = LayerChain("blocks", tuple(map(profile, ("embedding", "h.0", "h.1", "head"))))
    modules = LayerChain("modules", tuple(map(profile, ("embedding", "h.0.attention", "h.0.mlp", "head"))))
    names = [found.name for found in plan_profiles(plan, blocks, modules)]
    assert names == ["embedding", "h.0.attention", "h.0.mlp", "h.1", "head"]
    with pytest.raises(PlanError, match=r"layer h\.0\.attn has no profile; there are those of embedding, h\.0, h\.1"):
        plan_profiles(plan, blocks)


def test_what_a_plan_holds_is_the_peak_of_the_engine_where_it_is_known():
    plan = plan_of([LayerSettings(name="first")])
    assert plan.held_bytes == plan.peak_bytes == 0
    record = LayerRecord(
        formulation="osdp",
        as_published=True,
        solver="depth-first",
        status="feasible",
        objective_seconds=1.0,
        bound_seconds=None,
        gap=None,
        seconds=0.0,
        stage_peak_bytes=(10**9, 7),
        tensor_bytes=10**10,
    )
    counted = plan.model_copy(update={"record": record})
    assert (counted.held_bytes, counted.peak_bytes) == (10**9, 10**9)
    (peak,) = peaks(plan)
    engine = record.model_copy(update={"engine_peaks": (peak,)})
    known = plan.model_copy(update={"record": engine})
    assert (known.held_bytes, known.peak_bytes) == (peak.nbytes, 10**9)
