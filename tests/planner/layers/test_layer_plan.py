"""Layer plans as documents, and what their arithmetic refuses."""

from __future__ import annotations

import json
from itertools import product
from math import prod

import pytest

from planner.common.plan_error import PlanError
from planner.layers.plan.check import check_layer_plan, check_shared, divisors, prime_factors, stage_axes
from planner.layers.plan.document import (
    LayerPlan,
    LayerSettings,
    StagePlan,
    load_layer_plan,
    parse_layer_plan,
    save_layer_plan,
)
from planner.plan.decision import PlannedModel

MODEL = PlannedModel(source="hf:gpt2", batch=8, sequence=16, dtype="float32", seed=0)
NAMES = ("embedding", "first", "second", "head")


def plan_of(*layers: LayerSettings, devices: int = 8, **options) -> LayerPlan:
    return LayerPlan(model=MODEL, devices=devices, stages=(StagePlan(layers=layers),), **options)


def refused(plan: LayerPlan) -> str:
    with pytest.raises(PlanError) as error:
        check_layer_plan(plan)
    return str(error.value)


def test_a_plan_is_read_as_it_was_written(tmp_path):
    settings = LayerSettings(
        name="a", data_parallel=4, sharding="zero3", shard_degree=2, tensor_parallel=2, sequence_parallel=True,
        checkpoint=True, offload_hidden=True, offload_optimizer=True, slices=4, sharded_slices=3,
    )  # fmt: skip
    plan = plan_of(settings, micro_batches=2, schedule="gpipe", optimizer="sgd", seed=3)
    check_layer_plan(plan)
    save_layer_plan(plan, tmp_path / "plan.json")
    assert load_layer_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("version", [0, 2, "1", True, None])
def test_other_versions_are_refused(version):
    document = json.loads(plan_of(LayerSettings(name="a", data_parallel=8)).model_dump_json())
    with pytest.raises(PlanError, match=r"has version .*, this meshwright reads 1"):
        parse_layer_plan(json.dumps(document | {"version": version}), "here")


def test_what_is_wrong_with_a_document_is_named(tmp_path):
    document = json.loads(plan_of(LayerSettings(name="a", data_parallel=8)).model_dump_json())
    document["stages"][0]["layers"][0]["sharding"] = "zero1"
    with pytest.raises(PlanError, match=r"here: stages\.0\.layers\.0\.sharding: .*'zero2'"):
        parse_layer_plan(json.dumps(document), "here")
    with pytest.raises(PlanError, match="is not JSON"):
        parse_layer_plan("{", "here")
    with pytest.raises(PlanError, match="cannot be read"):
        load_layer_plan(tmp_path / "none.json")


def test_replicas_and_shards():
    assert (LayerSettings(name="a", data_parallel=8).replicas, LayerSettings(name="a", data_parallel=8).shards) == (
        8,
        1,
    )
    hybrid = LayerSettings(name="a", data_parallel=8, sharding="zero2", shard_degree=2)
    assert (hybrid.replicas, hybrid.shards, hybrid.devices) == (4, 2, 8)


def test_impossible_degrees_say_what_is_possible():
    message = refused(plan_of(LayerSettings(name="a", data_parallel=3)))
    assert "data-parallel 3 x tensor-parallel 1 is 3, its stage has 8 devices" in message
    assert "8 x 1, 4 x 2, 2 x 4, 1 x 8" in message
    message = refused(plan_of(LayerSettings(name="a", data_parallel=8), micro_batches=2))
    assert "a micro-batch of 4 cannot be divided by data-parallel 8: possible degrees are 1, 2, 4" in message
    message = refused(plan_of(LayerSettings(name="a", data_parallel=8, sharding="zero3", shard_degree=3)))
    assert "shard_degree 3 does not divide data-parallel 8: possible are 1, 2, 4, 8" in message


def test_batches_and_stages_that_do_not_divide_say_what_is_possible():
    layer = LayerSettings(name="a", data_parallel=8)
    assert "possible are 1, 2, 4, 8" in refused(plan_of(layer, micro_batches=3))
    stages = tuple(StagePlan(layers=(LayerSettings(name=name),)) for name in NAMES[:3])
    message = refused(LayerPlan(model=MODEL, devices=8, stages=stages))
    assert "8 devices cannot be shared equally by 3 stages: possible numbers of stages are 1, 2, 4, 8" in message
    stages = tuple(StagePlan(layers=(LayerSettings(name=name, data_parallel=2),)) for name in NAMES)
    assert "needs at least 4 micro-batches" in refused(LayerPlan(model=MODEL, devices=8, stages=stages))
    check_layer_plan(LayerPlan(model=MODEL, devices=8, stages=stages, schedule="gpipe"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard_degree": 2}, "needs sharding zero2 or zero3"),
        ({"sequence_parallel": True}, "needs tensor_parallel"),
        ({"sharded_slices": 1}, "needs sharding zero2 or zero3"),
        ({"sharding": "zero3", "slices": 2, "sharded_slices": 3}, "3 of 2 slices"),
        ({"sharding": "zero3", "offload_parameters": True, "offload_optimizer": True}, "leave offload_optimizer out"),
    ],
)
def test_settings_that_contradict_themselves(settings, message):
    assert message in refused(plan_of(LayerSettings(name="a", data_parallel=8, **settings)))


def test_a_layer_twice_is_refused():
    layer = LayerSettings(name="a", data_parallel=8)
    assert "layer a is planned 2 times" in refused(plan_of(layer, layer))


def test_a_parameter_of_three_stages_is_refused():
    stages = tuple(StagePlan(layers=(LayerSettings(name=name, data_parallel=2),)) for name in ("a", "b", "c"))
    plan = plan_of(*(layer for stage in stages for layer in stage.layers)).model_copy(update={"stages": stages})
    check_shared(plan, ["a", "c"])
    with pytest.raises(PlanError, match="layers a, b, c share a parameter and are in 3 stages: two at most"):
        check_shared(plan, ["a", "b", "c"])


@pytest.mark.parametrize("devices", range(1, 33))
def test_axes_are_prime_and_every_group_is_a_product_of_inner_ones(devices):
    for tensor, shards in product(divisors(devices), repeat=2):
        if devices % (tensor * shards):
            continue
        layer = LayerSettings(
            name="a", data_parallel=devices // tensor, tensor_parallel=tensor, sharding="zero3", shard_degree=shards
        )
        axes = stage_axes(devices, [layer])
        assert prod(axes) == devices
        assert axes == (1,) or all(prime_factors(axis) == [axis] for axis in axes)
        inner = {prod(axes[position:]) for position in range(len(axes) + 1)}
        assert {tensor, tensor * shards} <= inner


def test_groups_that_do_not_nest_are_refused():
    two, three = (LayerSettings(name=f"of{k}", data_parallel=6 // k, tensor_parallel=k) for k in (2, 3))
    with pytest.raises(PlanError, match="tensor-parallel 2 of layer of2 and tensor-parallel 3 of layer of3"):
        stage_axes(6, [two, three])
    assert stage_axes(8, [LayerSettings(name="a", data_parallel=4, tensor_parallel=2)]) == (2, 2, 2)
