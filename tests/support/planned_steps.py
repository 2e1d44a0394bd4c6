"""Small training steps by name, captured and with their strategy spaces; the same in tests and on ranks."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from planner.capture import CapturedStep, capture
from planner.cluster import load_cluster
from planner.costs import CostModel
from planner.models import ModelReference, TrainingStep, load_step
from planner.optimizers import optimizer_named
from planner.strategy_space import StrategySpace, build_strategy_space

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
    """Reference of a tiny step: a name of :data:`CONFIGURATIONS` or a function of ``support.models``."""
    if name not in CONFIGURATIONS:
        return ModelReference(f"support.models:{name}", batch=4, sequence=16, dtype="float32", seed=0)
    return ModelReference(f"hf:{configuration_file(name)}", batch=4, sequence=16, dtype="float32", seed=0, dropout=0.0)


def configuration_file(name: str) -> Path:
    """File of a configuration; every process writes the same."""
    path = Path(tempfile.gettempdir()) / "meshwright-tests" / name / "config.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(CONFIGURATIONS[name]), encoding="utf-8")
    return path


@cache
def captured_step(name: str) -> CapturedStep:
    """Captured step of :func:`step_reference`."""
    step = load_step(step_reference(name))
    return capture(step.module, step.example_args, step.example_kwargs, step.loss_fn)


@cache
def strategy_space(name: str, mesh: tuple[int, ...], optimizer: str = "adamw") -> StrategySpace:
    """Strategies of a step on a mesh."""
    costs = CostModel(load_cluster("a100-8-nvlink"), mesh)
    return build_strategy_space(captured_step(name), costs, mesh, optimizer_named(optimizer))


def real_step(name: str) -> TrainingStep:
    """Step with initialised parameters on the CPU."""
    return load_step(step_reference(name), "cpu")
