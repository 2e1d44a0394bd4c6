"""The most used families of transformers, small: which are planned, and which are refused by name."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    "vocab_size": 512,
    "head_dim": 16,
    "d_kv": 16,
    "image_size": 32,
    "num_labels": 8,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "decoder_start_token_id"), 1),
    "pad_token_id": 0,
}
"""Values for a small configuration, where it has the key."""

FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "decoder": {
        "gpt2": {},
        "llama": {},
        "mistral": {},
        "mixtral": {"num_local_experts": 4},
        "qwen2": {},
        "qwen3": {},
        "gemma2": {"sliding_window": 16},
        "phi3": {},
        "falcon": {},
        "opt": {},
        "bloom": {},
        "gpt_neox": {},
        "mamba": {"state_size": 8, "intermediate_size": 128},
    },
    "encoder": {
        "bert": {},
        "roberta": {"max_position_embeddings": 80},
        "distilbert": {},
        "electra": {},
        "deberta-v2": {},
        "modernbert": {},
    },
    "encoder-decoder": {"t5": {}, "mt5": {}, "bart": {}},
    "vision": {
        "vit": {"patch_size": 8},
        "swin": {"patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        "convnext": {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]},
        "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
        "dinov2": {"patch_size": 8},
    },
    "speech": {
        "whisper": {"architectures": ["WhisperForConditionalGeneration"], "max_source_positions": 32},
        "wav2vec2": {},
        "hubert": {},
    },
}
"""Kind -> family (model type of transformers) -> differences from :data:`_SMALL`."""


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """How a family fares.

    Parameters
    ----------
    kind, family
        As in :data:`FAMILIES`.
    outcome
        ``planned``, ``refused`` (by an error that names the reason) or ``defect`` (any other error).
    operators
        Operators of the traced step; 0 where it could not be traced.
    without_rule
        Notes of the plan about operators without a sharding rule.
    reason
        Why it was refused, with the workaround.
    seconds
        Time for loading, tracing and planning.
    """

    kind: str
    family: str
    outcome: str
    operators: int
    without_rule: tuple[str, ...]
    reason: str
    seconds: float


def family_rows(names: Sequence[str] = (), begins: Callable[[str], None] = lambda _: None) -> Iterator[FamilyRow]:
    """Plan a small model of every family on two ranks, one after another.

    Parameters
    ----------
    names
        Families; all if empty.
    begins
        Called with the family that begins.
    """
    for kind, families in FAMILIES.items():
        for family, differences in families.items():
            if not names or family in names:
                begins(family)
                yield _row(kind, family, differences)


def families_table(rows: Sequence[FamilyRow]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| kind | family | outcome | operators | without a sharding rule, or why it is refused |"]
    lines.append("|---|---|---|---:|---|")
    for row in rows:
        without = "; ".join(note.partition(": ")[0] for note in row.without_rule)
        text = (row.reason or without or "-").replace("|", "\\|")
        lines.append(f"| {row.kind} | {row.family} | {row.outcome} | {row.operators or '-'} | {text} |")
    return "\n".join(lines)


def _row(kind: str, family: str, differences: dict[str, Any]) -> FamilyRow:
    from planner.models.references import ModelReference
    from planner.session import PlanningSession, PlanRequest

    started, operators, outcome, reason = time.perf_counter(), 0, "planned", ""
    notes: tuple[str, ...] = ()
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(small_configuration(family, differences)))
            reference = ModelReference(f"hf:{path}", batch=4, sequence=32, dropout=0.0)
            session = PlanningSession(reference, "a100-8-nvlink", (2,))
            operators = len(session.graph.operators)
            plan = session.plan(PlanRequest(formulation="sharding", time_limit=60.0))
            notes = tuple(note for note in plan.record.notes if "rule" in note)
    except (ValueError, RuntimeError) as error:
        ours = type(error).__module__.partition(".")[0] in ("planner", "formulations")
        outcome, reason = ("refused" if ours else "defect"), " ".join(str(error).split()).replace(str(path), family)
    except Exception as error:
        outcome, reason = "defect", f"{type(error).__name__}: {' '.join(str(error).split())}"
    return FamilyRow(kind, family, outcome, operators, notes, reason, round(time.perf_counter() - started, 1))


def small_configuration(family: str, differences: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a small model of a family, with its differences of :data:`FAMILIES`."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(family).to_dict()
    return {"model_type": family, **{key: _SMALL[key] for key in _SMALL if key in default}, **differences}
