"""Plans of operators that are data parallelism, as plans of layers."""

from __future__ import annotations

import pytest
from support.layers.data_parallel import data_parallel_plan
from support.steps.planned_steps import real_step

from planner.plan.document import save_plan
from runtime.export.operator_form import layer_form
from runtime.export.plans import exported
from runtime.layers.families.registry import model_family


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_whole_parameters_are_replicated(name, mesh):
    names = [unit.name for unit in model_family(real_step(name)).units]
    plan, different = layer_form(data_parallel_plan(name, mesh, sharded=False, micro_batches=2), names)
    devices = 2 * len(mesh)
    assert different == ()
    assert [layer.name for layer in plan.layers] == names
    assert {(layer.data_parallel, layer.sharding) for layer in plan.layers} == {(devices, "none")}
    assert (plan.devices, plan.micro_batches, plan.model.batch) == (devices, 2, 8)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sharded_parameters_are_gathered_again_for_the_backward(name):
    names = [unit.name for unit in model_family(real_step(name)).units]
    plan, _ = layer_form(data_parallel_plan(name, (2,), sharded=True), names)
    settings = {(layer.data_parallel, layer.sharding, layer.shard_degree) for layer in plan.layers}
    assert settings == {(2, "zero3", 2)}


@pytest.mark.parametrize("sharded", [False, True])
def test_the_file_of_a_plan_of_operators(sharded, tmp_path):
    save_plan(data_parallel_plan("gpt2", (2,), sharded), tmp_path / "plan.json")
    text = exported(tmp_path / "plan.json", "torch", "parallel.py").text
    compile(text, "parallel.py", "exec")
    shape = "(1, 2, 1)" if sharded else "(2, 1, 1)"
    assert f'init_device_mesh(device_type, {shape}, mesh_dim_names=("replicas", "shards", "tensor"))' in text
