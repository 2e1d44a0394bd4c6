"""What the library costs beside the same training by hand, for ``make bench``: interleaved steps in one process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import gettempdir

import pytest
import torch
from support.layers.data_parallel import data_parallel_decision
from support.layers.layer_runs import staged_plan
from support.steps.planned_steps import made_plan

import runtime
from formulations.step.training_step import StepDecision
from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.models.references import ModelReference, load_step
from planner.overlap.best import fastest
from planner.plan.document import PlannedModel
from planner.replay.checker import OptimizerMemory, replay
from planner.scheduling.builder import build_schedule
from planner.strategies.instruction_costs import InstructionCosts
from planner.strategies.random_decision import random_decision
from planner.strategies.space import StrategySpace, build_strategy_space
from planner.strategies.traced_step import trace_step

pytestmark = pytest.mark.bench

ADAMW = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
CONFIGURATION = {
    "model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 2048, "n_positions": 128,
    "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def reference() -> ModelReference:
    """A GPT-2 whose step takes long beside what Python does for it."""
    path = Path(gettempdir()) / "meshwright-overhead" / "config.json"
    path.parent.mkdir(exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")  # the ranks write it at once
    written.write_text(json.dumps(CONFIGURATION), encoding="utf-8")
    written.replace(path)
    return ModelReference(f"hf:{path}", batch=8, sequence=128, dropout=0.0)


def ratio(ours: Callable[[], None], theirs: Callable[[], None], steps: int, clock: Callable[[], float]) -> float:
    """Median time of one step over that of the other, steps of both in turn."""
    seconds: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for number in range(steps + 1):
        for step, found in seconds.items():
            started = clock()
            step()
            if number:  # the first steps allocate
                found.append(clock() - started)
    return median(seconds[ours]) / median(seconds[theirs])


def by_hand(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A training step of torch alone."""
    optimizer = ADAMW(module.parameters())

    def step() -> None:
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def replicated_on_rank(plan, steps: int, clock: str = "perf_counter") -> float:
    """Time of a replicated plan's step over that of the plain module."""
    ours, theirs = (load_step(reference(), "cpu") for _ in range(2))
    batch = dict(theirs.example_kwargs)
    step = runtime.load(plan, ours.module, optimizer=ADAMW, device="cpu")
    return ratio(lambda: step(batch).item(), by_hand(theirs.module, batch), steps, getattr(time, clock))


def sharded_on_rank(plan, steps: int, clock: str = "perf_counter") -> float:
    """Time of a step of FSDP2 everywhere, by a plan of layers or of operators, over that of FSDP2 by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ours, theirs = (load_step(reference(), "cpu") for _ in range(2))
    batch = dict(theirs.example_kwargs)
    step = runtime.load(plan, ours.module, optimizer=ADAMW, device="cpu")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    inner = theirs.module.transformer
    for part in (*inner.h, inner.wte, inner.wpe, theirs.module.lm_head):
        fully_shard(part, mesh=mesh)
    fully_shard(theirs.module, mesh=mesh)
    own = {name: tensor[step.shares.rows.start : step.shares.rows.stop] for name, tensor in batch.items()}
    return ratio(lambda: step(batch).item(), by_hand(theirs.module, own), steps, getattr(time, clock))


def plan_of_operators(ranks: int, decide: Callable[[StrategySpace], StepDecision]):
    """A plan of operators by a function from strategies to a decision, with what it communicates beside them."""
    step = load_step(reference())
    traced = trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)
    costs = CostModel(load_cluster("local-cpu"), (ranks,))
    space = build_strategy_space(traced, costs, (ranks,), optimizer_named("adamw"))
    prices = InstructionCosts(traced.graph, costs, space.operator_strategies, "adamw")
    serial = build_schedule(space, decide(space))
    memory = OptimizerMemory(optimizer_named("adamw"))
    timed = partial(replay, traced.graph, optimizer=memory, seconds=prices, counter_based_random=True)
    schedule, _ = fastest(traced.graph, serial, prices, None, timed)
    return made_plan(traced, reference(), schedule, prices)


def replicated_plan():
    """A plan of one rank that recomputes nothing."""
    return plan_of_operators(1, lambda space: replace(random_decision(space, 0), recomputed={}))


def sharded_plan():
    """A plan of layers with FSDP2 everywhere on two ranks."""
    sharded = {"data_parallel": 2, "sharding": "zero3"}
    return staged_plan("", [sharded] * 6, devices=2, model=PlannedModel(**asdict(reference())))


def test_a_replicated_plan_beside_the_plain_module(benchmark, one_rank):
    (found,) = benchmark.pedantic(one_rank.run, args=(replicated_on_rank, replicated_plan(), 20), rounds=1)
    benchmark.extra_info["ratio"] = found
    assert found <= 1.03


def test_fsdp2_everywhere_beside_fsdp2_by_hand(benchmark, two_ranks):
    found = benchmark.pedantic(two_ranks.run, args=(sharded_on_rank, sharded_plan(), 20), rounds=1)
    benchmark.extra_info["ratio"] = max(found)
    assert max(found) <= 1.03


def test_operators_of_the_same_placements_beside_fsdp2_by_hand(benchmark, two_ranks):
    plan = plan_of_operators(2, partial(data_parallel_decision, sharded=True))
    found = benchmark.pedantic(two_ranks.run, args=(sharded_on_rank, plan, 20), rounds=1)
    benchmark.extra_info["ratio"] = max(found)
    assert max(found) <= 1.05
