"""Small training steps by name, traced and with their strategy spaces; the same in tests and on ranks."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from support.steps.traced_once import traced_once

from formulations.problem.files import write_text_atomically
from formulations.problem.solution import Status
from formulations.step.training_step import NodeKind, StepDecision
from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.models.references import ModelReference, TrainingStep, load_step
from planner.plan.decision import decision_digest
from planner.plan.document import Certificate, Fingerprints, Plan, PlannedModel, PlanOptions, Record, make_plan
from planner.replay.checker import OptimizerMemory, StepCosts, replay
from planner.schedule.instructions import Schedule
from planner.scheduling.builder import build_schedule
from planner.strategies.instruction_costs import InstructionCosts
from planner.strategies.random_decision import random_decision
from planner.strategies.space import StrategySpace, build_strategy_space
from planner.strategies.traced_step import TracedStep

CONFIGURATIONS = {
    "gpt2": {
        "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 128, "n_positions": 32,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "llama": {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 32,
    },
    "vit": {
        "model_type": "vit", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_labels": 8,
    },
}  # fmt: skip
"""Tiny transformers; dropout is set by :func:`step_reference`."""


def step_reference(name: str) -> ModelReference:
    """Reference of a tiny step: a name of :data:`CONFIGURATIONS` or a function of ``support.steps.models``.

    A configuration's name may have a dtype behind it, and then a ``reduce_dtype``: ``gpt2:bfloat16:same``.
    """
    name, *dtypes = name.split(":")
    if dtypes:
        return replace(step_reference(name), **dict(zip(("dtype", "reduce_dtype"), dtypes, strict=False)))
    if name not in CONFIGURATIONS:
        return ModelReference(f"support.steps.models:{name}", batch=4, sequence=16, dtype="float32", seed=0)
    return ModelReference(f"hf:{configuration_file(name)}", batch=4, sequence=16, dtype="float32", seed=0, dropout=0.0)


def configuration_file(name: str) -> Path:
    """File of a configuration; every process writes the same content to the same place."""
    content = json.dumps(CONFIGURATIONS[name])
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"meshwright-tests-{os.getuid()}" / f"{name}-{digest}" / "config.json"
    if not path.exists():
        write_text_atomically(path, content)
    return path


@cache
def traced_step(name: str) -> TracedStep:
    """Traced step of :func:`step_reference`."""
    return traced_once(step_reference(name))


@cache
def strategy_space(name: str, mesh: tuple[int, ...], optimizer: str = "adamw") -> StrategySpace:
    """Strategies of a step on a mesh."""
    costs = CostModel(load_cluster("a100-8-nvlink"), mesh)
    return build_strategy_space(traced_step(name), costs, mesh, optimizer_named(optimizer))


def real_step(name: str) -> TrainingStep:
    """Step with initialised parameters on the CPU."""
    return load_step(step_reference(name), "cpu")


def random_plan(name: str, mesh: tuple[int, ...], seed: int, optimizer: str = "adamw", micro_batches: int = 1) -> Plan:
    """Plan with random layouts and recomputation; certified by nobody."""
    space, traced = strategy_space(name, mesh, optimizer), traced_step(name)
    schedule = build_schedule(space, random_decision(space, seed))
    costs = InstructionCosts(
        traced.graph,
        CostModel(load_cluster("a100-8-nvlink"), mesh, micro_batches),
        space.operator_strategies,
        optimizer,
    )
    return plan_of(name, schedule, costs, optimizer, micro_batches)


def plan_of(name: str, schedule: Schedule, costs: StepCosts, optimizer: str = "adamw", micro_batches: int = 1) -> Plan:
    """Plan of a schedule; certified by nobody."""
    return made_plan(traced_step(name), step_reference(name), schedule, costs, optimizer, micro_batches)


def made_plan(
    traced: TracedStep,
    reference: ModelReference,
    schedule: Schedule,
    costs: StepCosts,
    optimizer: str = "adamw",
    micro_batches: int = 1,
) -> Plan:
    """Plan of a schedule of any step; certified by nobody."""
    memory = OptimizerMemory(optimizer_named(optimizer, micro_batches))
    report = replay(traced.graph, schedule, optimizer=memory, seconds=costs, counter_based_random=True)
    return make_plan(
        traced.graph,
        schedule,
        report,
        model=PlannedModel(**asdict(reference)),
        options=PlanOptions(
            cluster="a100-8-nvlink",
            mesh=schedule.mesh,
            optimizer=optimizer,
            grad_accum=micro_batches,
            formulation="random",
            counter_based_random=True,
            fused=memory.spec.fused or None,
            releases_sources=True,
        ),
        fingerprints=Fingerprints(graph=traced.fingerprint, cluster="0" * 64, rules="0" * 64),
        bound_ns=None,
        record=Record(certificate=Certificate(solver="random", status=Status.FEASIBLE, seconds=0.0)),
    )


def with_source(plan: Plan, source: str | None = None, graph_fingerprint: str | None = None) -> Plan:
    """A plan that claims to be of another model or graph."""
    decision = plan.decision
    if source is not None:
        decision = decision.model_copy(update={"model": decision.model.model_copy(update={"source": source})})
    if graph_fingerprint is not None:
        fingerprints = decision.fingerprints.model_copy(update={"graph": graph_fingerprint})
        decision = decision.model_copy(update={"fingerprints": fingerprints})
    return plan.model_copy(update={"decision": decision, "digest": decision_digest(decision)})


def replicated_decision(space: StrategySpace, seed: int) -> StepDecision:
    """A random decision that shards no parameter, so that gradients are all-reduced."""

    def rank(node: int, layout: int) -> int:
        outputs = space.strategies[node][layout].outputs
        is_parameter = space.model.nodes[node].kind is NodeKind.PARAMETER
        return int(is_parameter and any(placement != ("R",) * len(space.mesh) for placement in outputs))

    return random_decision(space, seed, rank=rank)
