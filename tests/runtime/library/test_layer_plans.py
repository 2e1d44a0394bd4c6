"""Plans of layers through ``runtime.load``: like torch alone, and exchangeable with plans of operators."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file
from support.layers.layer_random import random_layer_plan
from support.layers.layer_runs import staged_plan
from support.processes.library_runs import ADAMW, OPTIMIZERS, Trained, batches, scheduler_of, train_alone, train_on_rank
from support.steps.planned_steps import random_plan, real_step, step_reference
from support.tiers import slow

import runtime
from planner.layers.plan.document import LayerPlan
from planner.models.references import load_step
from planner.plan.document import PlannedModel
from runtime.job.process_group import broadcast_text
from runtime.layers.reference import model_reference

alone = cache(train_alone)
DATA, TENSOR = {"data_parallel": 2, "sharding": "zero3"}, {"tensor_parallel": 2, "sequence_parallel": True}


def layer_plan(name: str, *stages: list[dict[str, object]], devices: int, **options) -> LayerPlan:
    """A plan of the model that plans of operators are made of by the same name."""
    return staged_plan(name, *stages, devices=devices, model=PlannedModel(**asdict(step_reference(name))), **options)


def cut_plan(name: str) -> LayerPlan:
    """Two ranks: blocks whose products are shared or cut, beside sharded ends; two micro-batches."""
    cut = {**DATA, "slices": 2, "sharded_slices": 1, "checkpoint": True}
    return layer_plan(name, [DATA, TENSOR, cut, DATA], devices=2, micro_batches=2)


def staged(name: str) -> LayerPlan:
    """Two stages of one rank; GPT-2's table of tokens is in both."""
    return layer_plan(name, [{}, {}], [{}, {}], devices=2, micro_batches=2)


def square_plan(name: str) -> LayerPlan:
    """Four ranks: data and tensor parallelism in one layer, replicas of shards, state in host memory."""
    both = {"data_parallel": 2, "tensor_parallel": 2, "sharding": "zero3", "offload_optimizer": True}
    ends = {"data_parallel": 4, "sharding": "zero2", "shard_degree": 2}
    return layer_plan(name, [ends, both, {**both, "sharding": "none"}, ends], devices=4)


def pipelined(name: str) -> LayerPlan:
    """Four ranks, two stages of two unlike layers."""
    return layer_plan(name, [DATA, TENSOR], [TENSOR, DATA], devices=4, micro_batches=2, schedule="gpipe")


def uneven(name: str) -> LayerPlan:
    """Four ranks: stages of one, two and one; GPT-2's table of tokens is in the first and the last."""
    return layer_plan(name, [{}], [TENSOR, DATA], [{}], devices=4, sizes=(1, 2, 1), micro_batches=2, schedule="gpipe")


def check(found: Trained, expected: Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-4)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        assert torch.allclose(found.tensors[key], tensor, rtol=1e-4, atol=1e-4), key


@pytest.mark.parametrize(
    ("make", "name", "optimizer", "clip_norm", "shares"),
    [
        (cut_plan, "gpt2", "adamw", 0.5, "rows"),
        slow(staged, "gpt2", "foreach", 0.5, "global"),
        slow(square_plan, "gpt2", "adamw", 0.5, "rows"),
        slow(pipelined, "llama", "fused", None, "rows"),
        slow(uneven, "gpt2", "adamw", 0.5, "rows"),
        *(
            pytest.param(*case, marks=pytest.mark.fuzz)
            for case in (
                (staged, "llama", "fused", None, "rows"),
                (cut_plan, "llama", "nesterov", 0.1, "global"),
                (square_plan, "llama", "rmsprop", None, "global"),
                (uneven, "gpt2", "nesterov", None, "global"),
            )
        ),
    ],
)
def test_ranks_train_like_torch_alone(make, name, optimizer, clip_norm, shares, two_ranks, four_ranks, tmp_path):
    plan = make(name)
    ranks = four_ranks if plan.devices == 4 else two_ranks
    for found in ranks.run(train_on_rank, plan, name, optimizer, clip_norm, shares, tmp_path):
        check(Trained(*found), alone(name, optimizer, clip_norm))


def go_on_on_rank(plan, name, begin, end, folder, export, beside=False):
    """Losses of steps ``begin`` to ``end`` of a job that resumes there, and saves behind each of them."""
    step = runtime.load(plan, real_step(name).module, optimizer=OPTIMIZERS["adamw"], clip_norm=0.5, device="cpu")
    scheduler = scheduler_of(step.optimizer)
    position = step.resume(folder / f"step-{begin:08d}", scheduler) if begin else {"batch": 0}
    assert (step.steps, position) == (begin, {"batch": begin})
    losses = []
    for batch in batches(name, end)[begin:]:
        losses.append(step(batch).item())
        scheduler.step()
        if folder is not None and not begin:
            step.save(folder, scheduler, {"batch": step.steps}, wait=not beside)
    step.wait_for_save()
    step.export(export)
    return losses


@pytest.mark.parametrize("make", [cut_plan, pytest.param(staged, marks=pytest.mark.fuzz)])
def test_checkpoints_are_exchangeable_with_plans_of_operators(make, two_ranks, tmp_path):
    """Written while the next step trains; the other kind goes on within rounding, the same plan bit-equal."""
    layers, operators = make("gpt2"), random_plan("gpt2", (2,), 3)
    files = [tmp_path / f"{number}.safetensors" for number in range(4)]
    whole, _ = two_ranks.run(go_on_on_rank, layers, "gpt2", 0, 4, None, files[0])
    two_ranks.run(go_on_on_rank, layers, "gpt2", 0, 3, tmp_path / "layers", files[1], True)
    two_ranks.run(go_on_on_rank, operators, "gpt2", 0, 2, tmp_path / "operators", files[1])
    for plan, folder, file in (
        (layers, "layers", files[1]),
        (operators, "layers", files[2]),
        (layers, "operators", files[3]),
    ):
        for losses in two_ranks.run(go_on_on_rank, plan, "gpt2", 2, 4, tmp_path / folder, file):
            if file == files[1]:
                assert losses == whole[2:]
            assert losses == pytest.approx(whole[2:], rel=1e-5)
    expected = load_file(files[0])
    assert all(torch.equal(load_file(files[1])[key], tensor) for key, tensor in expected.items())
    for file in files[2:]:
        found = load_file(file)
        assert all(torch.allclose(found[key], tensor, rtol=1e-4, atol=1e-5) for key, tensor in expected.items())


def random_run_on_rank(plan: LayerPlan):
    """Losses, norms, an evaluation and whole tensors of two steps of a random plan."""
    step = load_step(model_reference(plan), "cpu")
    batch = step.example_kwargs
    loaded = runtime.load(plan, step.module, optimizer=ADAMW, clip_norm=0.5, device="cpu")
    losses, norms = [], []
    for _ in range(2):
        losses.append(loaded(batch).item())
        norms.append(float(loaded.gradient_norm))
    evaluated = loaded.evaluate(batch).item()
    with TemporaryDirectory() as folder:
        path = broadcast_text(folder)
        tensors = load_file(loaded.export(f"{path}/weights.safetensors"))
        torch.distributed.barrier()
    return losses, evaluated, norms, tensors


@cache
def random_run_alone(reference) -> Trained:
    step = load_step(reference, "cpu")
    module, batch = step.module, step.example_kwargs
    updater = ADAMW([parameter for parameter in module.parameters() if parameter.requires_grad])
    losses, norms = [], []
    for _ in range(2):
        loss = module(**batch).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        updater.step()
        updater.zero_grad()
        losses.append(loss.item())
    module.eval()
    return Trained(losses, module(**batch).loss.item(), norms, dict(module.state_dict()))


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        slow("gpt2", 41),
        slow("llama", 40),
        *(pytest.param(name, seed, marks=pytest.mark.fuzz) for name in ("gpt2", "llama") for seed in range(42, 60)),
    ],
)
def test_random_plans_train_like_torch_alone(name, seed, two_ranks, four_ranks):
    devices = 4 if seed % 2 else 2
    plan = random_layer_plan(name, devices, seed)
    ranks = four_ranks if devices == 4 else two_ranks
    for found in ranks.run(random_run_on_rank, plan):
        check(Trained(*found), random_run_alone(model_reference(plan)))
