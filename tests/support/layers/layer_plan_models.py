"""Small models of every family that the layer executor knows."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from formulations.problem.files import write_text_atomically
from planner.models.references import ModelReference, load_step
from runtime.layers.families.registry import model_family

CONFIGURATIONS = {
    "gpt2": {
        "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 128, "n_positions": 32,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "deep": {
        "model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 64, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 32,
        "pad_token_id": 127,
    },
    "bert": {
        "model_type": "bert", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 32,
    },
    "t5": {
        "model_type": "t5", "num_layers": 2, "num_decoder_layers": 2, "d_model": 32, "d_ff": 64, "d_kv": 8,
        "num_heads": 4, "vocab_size": 128,
    },
    "vit": {
        "model_type": "vit", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_labels": 8,
    },
}  # fmt: skip
BATCH, SEQUENCE = 8, 16
SEQUENCES = {"deep": 64}
"""Lengths of sequences that differ from :data:`SEQUENCE`."""


@cache
def configuration_file(name: str) -> str:
    """Path of a configuration, the same in every process of a test."""
    folder = Path(tempfile.gettempdir()) / "meshwright-layer-plan-models"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps(CONFIGURATIONS[name])
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text_atomically(path, text)
    return str(path)


def layer_reference(
    name: str, layers: int | None = None, dropout: float = 0.0, dtype: str = "float32"
) -> ModelReference:
    """Reference of a small model."""
    source, sequence = f"hf:{configuration_file(name)}", SEQUENCES.get(name, SEQUENCE)
    return ModelReference(source, batch=BATCH, sequence=sequence, dtype=dtype, layers=layers, dropout=dropout)


def layer_names(reference: ModelReference) -> tuple[str, ...]:
    """Names of a model's layers, in the order in which they run."""
    return tuple(unit.name for unit in model_family(load_step(reference, "meta")).units)
