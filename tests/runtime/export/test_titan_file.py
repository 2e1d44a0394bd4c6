"""Plans as jobs of torchtitan: every field, and what torchtitan has no field for."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from support.layers.layer_runs import names_of, planned_model

from planner.layers.plan.document import LayerPlan, LayerSettings, StagePlan, save_layer_plan
from planner.plan.decision import PlannedModel
from runtime.export.plans import exported
from runtime.export.translation import ExportError

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def model_8b(folder: Path, dtype: str = "bfloat16") -> PlannedModel:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return PlannedModel(source=f"hf:{path}", batch=16, sequence=4096, dtype=dtype, seed=0)


def plan_of(model: PlannedModel, devices: int, stages: int = 1, changes: Any = None, **plan: Any) -> LayerPlan:
    names = names_of(model)
    settings = {"data_parallel": devices // stages, "sharding": "zero3", **plan.pop("settings", {})}
    layers = [LayerSettings(name=name, **settings, **(changes or {}).get(name, {})) for name in names]
    cut = len(names) // stages
    parts = [layers[k * cut : (k + 1) * cut if k + 1 < stages else None] for k in range(stages)]
    staged = tuple(StagePlan(layers=tuple(part)) for part in parts)
    return LayerPlan(model=model, devices=devices, stages=staged, **plan)


def job_of(plan: LayerPlan, folder: Path, flavor: str | None = None) -> dict[str, dict[str, Any]]:
    """Arguments of the calls whose results become fields of the job, by field."""
    save_layer_plan(plan, folder / "plan.json")
    tree = ast.parse(exported(folder / "plan.json", "torchtitan", "job.py", flavor).text)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert function.name == "planned"
    found = {}
    for node in function.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            value = node.value
            named = {k.arg: _value(k.value) for k in value.keywords} if isinstance(value, ast.Call) else {}
            given = [_value(argument) for argument in value.args] if isinstance(value, ast.Call) else [_value(value)]
            found[node.targets[0].attr] = named | dict(enumerate(given))
    return found


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def test_a_sharded_plan_with_checkpoints(tmp_path):
    blocks = {f"model.layers.{k}": {"checkpoint": True} for k in range(32)}
    plan = plan_of(model_8b(tmp_path), 8, changes=blocks, micro_batches=2, optimizer="adamw_mixed")
    job = job_of(plan, tmp_path)
    assert job["model_spec"] == {0: "8B"}
    assert job["training"] == {
        "local_batch_size": 1,
        "global_batch_size": 16,
        "seq_len": 4096,
        "enable_cpu_offload": False,
        "dtype": "float32",
        "mixed_precision_param": "bfloat16",
        "steps": 10,
        "disable_cuda_graphs": False,
    }
    assert job["parallelism"] == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 8,
        "fsdp_reshard_after_forward": "always",
        "tensor_parallel_degree": 1,
        "enable_sequence_parallel": False,
        "pipeline_parallel_degree": 1,
    }
    plan = plan_of(model_8b(tmp_path), 8, settings={"data_parallel": 4, "shard_degree": 2, "tensor_parallel": 2})
    parallelism = job_of(plan, tmp_path)["parallelism"]
    assert parallelism["data_parallel_replicate_degree"] == 2
    assert parallelism["data_parallel_shard_degree"] == 2
    assert parallelism["tensor_parallel_degree"] == 2


def test_stages_are_lists_of_modules(tmp_path):
    plan = plan_of(model_8b(tmp_path), 8, 2, micro_batches=4, schedule="gpipe", settings={"sharding": "zero2"})
    job = job_of(plan, tmp_path)
    stages = job["parallelism"]["module_fqns_per_model_part"]
    assert stages[0] == ["tok_embeddings", *(f"layers.{k}" for k in range(16))]
    assert stages[1] == [*(f"layers.{k}" for k in range(16, 32)), "norm", "lm_head"]
    assert job["parallelism"]["pipeline_parallel_schedule"] == "GPipe"
    assert job["parallelism"]["pipeline_parallel_microbatch_size"] == 1
    assert job["parallelism"]["fsdp_reshard_after_forward"] == "never"
    assert job["training"]["local_batch_size"] == 4
    assert job["training"]["disable_cuda_graphs"] is True


def test_what_torchtitan_has_no_field_for_is_listed(tmp_path):
    changes = {
        "model.layers.0": {"checkpoint": True, "offload_hidden": True},
        "model.layers.1": {"slices": 2},
        "head": {"checkpoint": True},
    }
    with pytest.raises(ExportError) as refused:
        job_of(plan_of(model_8b(tmp_path), 8, changes=changes, optimizer="sgd"), tmp_path)
    for words in (
        "1 of 32 blocks are checkpointed",
        "embedding or head are checkpointed",
        "offload hidden",
        "matrix products in slices",
        "optimizer sgd: its own is AdamW",
    ):
        assert words in str(refused.value)
    degrees = {"embedding": {"data_parallel": 8, "tensor_parallel": 1}}
    plan = plan_of(model_8b(tmp_path), 8, settings={"data_parallel": 4, "tensor_parallel": 2})
    first = plan.stages[0].layers[0].model_copy(update=degrees["embedding"])
    unlike = plan.model_copy(update={"stages": (StagePlan(layers=(first, *plan.stages[0].layers[1:])),)})
    with pytest.raises(ExportError, match=r"layers differ in data_parallel \(4, 8\)"):
        job_of(unlike, tmp_path)


def test_parts_of_a_block_that_are_alike_are_the_block(tmp_path):
    plan = plan_of(planned_model("llama"), 2)
    first, *blocks, last = plan.stages[0].layers
    parts = [b.model_copy(update={"name": f"{b.name}.{part}"}) for b in blocks for part in ("self_attn", "mlp")]

    def with_parts(*changed: LayerSettings) -> LayerPlan:
        return plan.model_copy(update={"stages": (StagePlan(layers=(first, *changed, last)),)})

    assert job_of(with_parts(*parts), tmp_path, "mine") == job_of(plan, tmp_path, "mine")
    unlike = parts[0].model_copy(update={"checkpoint": True})
    with pytest.raises(ExportError, match="blocks whose parts differ"):
        job_of(with_parts(unlike, *parts[1:]), tmp_path, "mine")


def test_a_model_that_it_does_not_have_needs_a_flavor(tmp_path):
    small = planned_model("llama")
    with pytest.raises(
        ExportError, match=r"torchtitan has no llama3 of these sizes \(width 32, inner width 96, layers 2, heads 4"
    ):
        job_of(plan_of(small, 2), tmp_path)
    assert job_of(plan_of(small, 2), tmp_path, "mine")["model_spec"] == {0: "mine"}
    with pytest.raises(ExportError, match="has Llama, not GPT2LMHeadModel"):
        job_of(plan_of(planned_model("gpt2"), 2), tmp_path)
