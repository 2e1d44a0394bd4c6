"""Steps of seven model families with two to four layers, and limits that bind."""

from __future__ import annotations

import json
import os
import tempfile
from functools import lru_cache
from pathlib import Path

from formulations.problem.files import write_text_atomically
from formulations.solvers import SolverPool
from planner.models.references import ModelReference
from planner.session import PlanningSession, PlanRequest

BATCH, SEQUENCE = 8, 128
MESH = (2, 2)
CLUSTER = Path(__file__).parents[2] / "fixtures" / "clusters" / "local-cpu.json"
"""One measurement of a machine, so that problems are the same everywhere: another one may make them easy or hard."""

LIMITS = (0.5, 0.65, 0.83)
"""Shares of the peak of the best layouts without a limit; the last two are 54 and 69 MiB for the Qwen3."""

SECONDS = 20.0

_ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
_WIDE = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 704, **_ATTENTION}

STEPS = {
    "qwen3": {**_WIDE, "head_dim": 32, "vocab_size": 5003, "attention_dropout": 0.0},
    "mistral": {**_WIDE, "vocab_size": 4096},
    "gemma3_text": {**_WIDE, "num_attention_heads": 4, "head_dim": 64, "num_key_value_heads": 2, "vocab_size": 4096},
    "mixtral": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "num_local_experts": 4,
        "max_position_embeddings": 256,
    },
    "whisper": {
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "vocab_size": 1024,
        "max_source_positions": 128,
        "max_target_positions": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "mamba": {"num_hidden_layers": 2, "hidden_size": 128, "state_size": 8, "vocab_size": 1024},
    "t5": {
        "num_layers": 4,
        "num_decoder_layers": 4,
        "d_model": 256,
        "d_ff": 512,
        "d_kv": 32,
        "num_heads": 8,
        "vocab_size": 4096,
    },
}
"""Differences from the default configuration of each model type of transformers."""


@lru_cache(maxsize=1)
def real_session(name: str) -> PlanningSession:
    """The traced step of a family."""
    path = Path(tempfile.gettempdir()) / f"meshwright-tests-{os.getuid()}" / "real-steps" / f"{name}.json"
    write_text_atomically(path, json.dumps({"model_type": name, **STEPS[name]}))
    step = ModelReference(f"hf:{path}", batch=BATCH, sequence=SEQUENCE, dtype="float32", seed=0, dropout=0.0)
    return PlanningSession(step, str(CLUSTER), MESH)


def requests_within(
    session: PlanningSession, share: float, formulations: tuple[str, ...], pool: SolverPool
) -> list[PlanRequest]:
    """Requests of some formulations within a share of the peak of the best layouts without a limit."""
    free = session.solve(PlanRequest(None, "sharding", time_limit=SECONDS), pool=pool)
    memory = int(share * session.execute(free.decision).peak) + session.budget(None).reserve_bytes
    return [PlanRequest(memory, name, time_limit=SECONDS) for name in formulations]
