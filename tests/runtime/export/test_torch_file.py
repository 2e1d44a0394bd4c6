"""Plans as files of torch's own functions: the model of the plan, and the losses of one process."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.layers.exportable_plans import exportable_plan
from support.layers.layer_random import random_layer_plan
from support.layers.layer_runs import names_of, planned_model
from support.steps.planned_steps import random_plan
from support.tiers import first, only, slow

from planner.layers.plan.document import LayerPlan, LayerSettings, StagePlan, save_layer_plan
from planner.models.references import load_step, reference_of
from planner.plan.document import save_plan
from runtime.export.plans import exported
from runtime.export.translation import ExportError

FAMILIES = ("llama", "gpt2", "bert", "vit", "t5")
STEPS = 5


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("exported_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(plan: LayerPlan, folder: Path) -> Path:
    save_layer_plan(plan, folder / "plan.json")
    path = folder / "parallel.py"
    path.write_text(exported(folder / "plan.json", "torch", path.name).text)
    return path


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed)]


def run_on_rank(path: Path) -> str:
    """Run the file in a process group that exists; what it prints."""
    printed = io.StringIO()
    with (
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        imported(path).main()
    return printed.getvalue()


def one_process(path: Path, optimizer: str) -> list[float]:
    """Losses of the file's model and batches in one process."""
    file = imported(path)
    torch.manual_seed(file.SEED)
    model = file.build_model()
    updates = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-2),
        "sgd_momentum": lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    }[optimizer]()
    losses = []
    for step in range(file.STEPS):
        loss = model(**file.batch_of(step)).loss
        loss.backward()
        updates.step()
        updates.zero_grad()
        losses.append(loss.item())
    return losses


def check_losses(plan: LayerPlan, folder: Path, pool: Any) -> None:
    path = written(plan, folder)
    found = losses_in(pool.run(run_on_rank, path)[0])
    expected = one_process(path, plan.optimizer)
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=1e-5, abs=2e-6), plan


@pytest.mark.parametrize("seed", first(1, range(4)))
@pytest.mark.parametrize("name", only(("llama", "gpt2"), FAMILIES))
def test_the_losses_are_those_of_one_process(name, seed, two_ranks, four_ranks, tmp_path):
    devices = 4 if seed % 2 == 0 else 2
    check_losses(exportable_plan(name, devices, seed), tmp_path, four_ranks if devices == 4 else two_ranks)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(10, 30))
@pytest.mark.parametrize("name", FAMILIES)
def test_the_losses_of_many_plans(name, seed, four_ranks, tmp_path):
    check_losses(exportable_plan(name, 4, seed), tmp_path, four_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FAMILIES)
def test_any_plan_is_refused_with_the_reasons_or_runs(name, seed, four_ranks, tmp_path):
    plan = random_layer_plan(name, 4, seed)
    try:
        written(plan, tmp_path)
    except ExportError as error:
        reason = str(error)
    else:
        check_losses(plan, tmp_path, four_ranks)
        return
    assert re.match(r"the plan has \d stages|torch's functions cannot express this plan: .+", reason)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_file_builds_the_model_of_the_plan(name, tmp_path):
    plan = exportable_plan(name, 2, 0)
    file = imported(written(plan, tmp_path))
    torch.manual_seed(plan.model.seed)
    model, step = file.build_model(), load_step(reference_of(plan.model), "cpu")
    expected = step.module.state_dict()
    assert model.training
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
    batch = file.batch_of(0)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in batch.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in step.example_kwargs.items()
    }


@pytest.mark.parametrize("name", only(("llama", "t5"), FAMILIES))
def test_the_file_reads_well(name, tmp_path):
    """No unused name, no undefined one, nothing that is not sorted."""
    for seed in range(4):
        path = written(exportable_plan(name, 4, seed), tmp_path)
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E4,E7,E9,F,B,UP", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + path.read_text()


def plan_with(
    name: str,
    devices: int,
    *changes: dict[str, Any],
    dtypes: dict[str, str] | None = None,
    **plan: Any,
) -> LayerPlan:
    """A plan whose layers have some settings, the last of which all others repeat."""
    model = planned_model(name).model_copy(update=dtypes or {})
    names = names_of(model)
    settings = [changes[min(number, len(changes) - 1)] for number in range(len(names))]
    layers = tuple(LayerSettings(name=each, **setting) for each, setting in zip(names, settings, strict=True))
    return LayerPlan(model=model, devices=devices, stages=(StagePlan(layers=layers),), **plan)


@pytest.mark.parametrize("sequence_parallel", [slow(False), True])
def test_blocks_that_are_planned_alike_are_loops(sequence_parallel, two_ranks, tmp_path):
    end = {"tensor_parallel": 2}
    block = {**end, "sequence_parallel": sequence_parallel, "checkpoint": True}
    plan = plan_with("llama", 2, end, block, block, end)
    check_losses(plan, tmp_path, two_ranks)
    text = (tmp_path / "parallel.py").read_text()
    assert text.count("for block in model.model.layers[0:2]:") == 3  # divided, checkpointed, sharded
    assert "checkpointed(block)" in text


def test_parts_of_a_divided_block_may_be_sharded_differently(four_ranks, tmp_path):
    settings = {"data_parallel": 2, "tensor_parallel": 2}
    plan = plan_with("llama", 4, settings)
    first, *blocks, last = plan.stages[0].layers
    parts = [
        block.model_copy(update={"name": f"{block.name}.{part}", "sharding": sharding})
        for block in blocks
        for part, sharding in (("self_attn", "none"), ("mlp", "zero3"))
    ]
    check_losses(plan.model_copy(update={"stages": (StagePlan(layers=(first, *parts, last)),)}), tmp_path, four_ranks)


def test_what_has_no_word_is_refused_with_every_reason(tmp_path):
    tensor, data = {"tensor_parallel": 2}, {"data_parallel": 2}
    with pytest.raises(ExportError) as refused:
        written(plan_with("llama", 2, tensor, data), tmp_path)
    assert "data_parallel is 1 in 1 and 2 in 3 layers" in str(refused.value)
    assert "tensor_parallel is 1 in 3 and 2 in 1 layers" in str(refused.value)
    with pytest.raises(ExportError) as refused:
        written(plan_with("gpt2", 2, tensor), tmp_path)
    assert "attn.c_attn of Gpt2Block is 3 matrices in one" in str(refused.value)
    model = planned_model("deep")
    names = names_of(model)
    stages = tuple(StagePlan(layers=tuple(LayerSettings(name=n) for n in part)) for part in (names[:3], names[3:]))
    with pytest.raises(ExportError, match=r"the plan has 2 stages: .* export it for torchtitan"):
        written(LayerPlan(model=model, devices=2, stages=stages, micro_batches=2), tmp_path)


def test_what_changes_no_number_is_named(tmp_path):
    setting = {"data_parallel": 2, "sharding": "zero3"}
    blocks = {**setting, "slices": 2, "offload_optimizer": True}
    plan = plan_with("deep", 2, setting, blocks, blocks, blocks, blocks, setting)
    save_layer_plan(plan, tmp_path / "plan.json")
    found = exported(tmp_path / "plan.json", "torch", "parallel.py")
    assert found.left_out == (
        "optimizer state on the host, parameters on the device: transformer.h.0 and 3 more layers",
        "matrix products in slices: transformer.h.0 and 3 more layers",
    )
    assert all(f"- {words}" in found.text for words in found.left_out)


@pytest.mark.parametrize(
    ("optimizer", "reduce_dtype", "policy"),
    [
        ("adamw", "same", None),
        ("adamw", "float32", "reduce_dtype=torch.float32"),
        slow("adamw_mixed", "same", "param_dtype=torch.bfloat16"),
        slow("adamw_mixed", "float32", "param_dtype=torch.bfloat16, reduce_dtype=torch.float32"),
    ],
)
def test_gradients_are_summed_in_the_dtype_of_the_plan(optimizer, reduce_dtype, policy, two_ranks, tmp_path):
    changes = {"data_parallel": 2, "sharding": "zero3"}
    plan = plan_with(
        "llama", 2, changes, dtypes={"dtype": "bfloat16", "reduce_dtype": reduce_dtype}, optimizer=optimizer
    )
    path = written(plan, tmp_path)
    policies = re.findall(r"mp_policy=MixedPrecisionPolicy\((.*?)\)", path.read_text())
    assert set(policies) == ({policy} if policy else set())
    assert len(policies) == (path.read_text().count(" fully_shard(") if policy else 0)
    found = losses_in(two_ranks.run(run_on_rank, path)[0])
    assert found == pytest.approx(one_process(path, "adamw"), rel=1e-2), plan


def test_a_plan_of_operators_is_refused_with_what_it_decides(tmp_path):
    save_plan(random_plan("gpt2", (2, 2), 3), tmp_path / "plan.json")
    with pytest.raises(ExportError) as refused:
        exported(tmp_path / "plan.json", "torch", "parallel.py")
    for words in ("decides operator by operator", "operators run again by themselves", "operators that divide their"):
        assert words in str(refused.value)
    save_plan(random_plan("mlp", (2,), 0), tmp_path / "mlp.json")
    with pytest.raises(ExportError, match=r"cannot cut a \w+ into layers.* run it here \(meshwright run"):
        exported(tmp_path / "mlp.json", "torch", "parallel.py", allow_code=True)


@pytest.mark.slow
def test_the_command_writes_a_file_that_torchrun_runs(meshwright, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = exportable_plan("llama", 2, 0)
    save_layer_plan(plan, tmp_path / "plan.json")
    outcome = meshwright("export", "plan.json", "--out", "parallel.py")
    assert (outcome.code, outcome.out) == (0, "wrote parallel.py\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "parallel.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = one_process(tmp_path / "parallel.py", plan.optimizer)
    assert losses_in(done.stdout) == pytest.approx(expected, rel=1e-5, abs=2e-6)


def test_wrong_options_are_named(meshwright, tmp_path):
    save_layer_plan(exportable_plan("llama", 2, 0), tmp_path / "plan.json")
    for options, message in {
        ("--to", "jax", "--out", "a.py"): "--to: 'jax' is unknown; choose torch or torchtitan",
        ("--out", "a-b.py"): "--out: 'a-b.py' cannot be imported",
        ("--out", "a.txt"): "--out: 'a.txt' cannot be imported",
        ("--out", "a.py", "--flavor", "8B"): "--flavor: 8B is torchtitan's",
    }.items():
        outcome = meshwright("export", tmp_path / "plan.json", *options)
        assert outcome.code == 2
        assert message in outcome.err
