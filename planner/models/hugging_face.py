"""Models of the transformers library by name or ``config.json``, built from their configuration alone.

Nothing is downloaded: weights are initialised, or have no storage on ``meta``. The class with a training
loss is chosen: causal, sequence-to-sequence or masked language model, image or audio classification, speech to text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.common.model_error import ModelError
from planner.models.chunked_loss import chunk_loss
from planner.torch_adapter.tracing.settings import quiet_transformers

_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-medium": ("gpt2", {"n_layer": 24, "n_embd": 1024, "n_head": 16}),
    "gpt2-large": ("gpt2", {"n_layer": 36, "n_embd": 1280, "n_head": 20}),
    "gpt2-xl": ("gpt2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "gpt3-175b": ("gpt2", {"n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048}),
    "llama": ("llama", {}),
    "llama3-8b": (
        "llama",
        {
            "vocab_size": 128256,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
    ),
    "llama3-70b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
    ),
    "bert": ("bert", {}),
    "bert-large": (
        "bert",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    ),
    "vit": ("vit", {}),
    "vit-large": (
        "vit",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    ),
    "t5": ("t5", {}),
    "t5-base": ("t5", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12}),
    "t5-large": ("t5", {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 16}),
}
"""Published sizes: model type and what differs from the defaults of its configuration class."""

_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers", "encoder_layers", "decoder_layers")
_OF_TEXT = ("sequence_to_sequence", "masked", "causal")
_IMAGE_SIZE = 224
"""Height and width of images where the configuration has none, as in the papers of convolutional networks."""
_MASKED_SHARE = 0.15
"""Share of the tokens that a masked language model is trained to predict (Devlin et al. 2018, section 3.1)."""


def hugging_face_step(
    name: str,
    *,
    batch: int,
    sequence: int,
    dtype: torch.dtype,
    seed: int,
    layers: int | None,
    dropout: float | None,
    loss_chunks: int,
    device: str,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Module in training mode whose output has ``.loss``, and its example arguments.

    Parameters
    ----------
    name
        A size of :data:`_SIZES`, or the path of a ``config.json``.
    batch, sequence, dtype, seed, layers, dropout, loss_chunks, device
        See :class:`planner.models.references.ModelReference` and :func:`planner.models.references.load_step`.

    Raises
    ------
    ModelError
        The name or model type is unknown, the file cannot be read, or the sequence is too long.
    """
    _require_transformers(name)
    with quiet_transformers(), _failures_named(name):
        config = _configuration(name)
        _override(config, name, layers, dropout)
        task = _task(config, name)
        positions = getattr(config, "max_position_embeddings", None) if task in _OF_TEXT else None
        if positions is not None and sequence > positions:
            raise ModelError(
                f"model hf:{name} has {positions} positions, the sequence has {sequence}: shorten it, "
                "or raise max_position_embeddings in a config.json"
            )
        with torch.device(device):
            module: nn.Module = _auto_class(task).from_config(config, dtype=dtype)
        module.train()
        if loss_chunks > 1:
            if task != "causal":
                raise ModelError(f"model hf:{name}: only causal language models take --loss-chunks; leave it out")
            chunk_loss(module, name, loss_chunks)
        if task == "image_classification":
            examples = _images(config, batch, dtype, seed)
        elif task in ("speech_to_text", "audio_classification"):
            examples = _sounds(config, task, batch, sequence, dtype, seed)
        else:
            examples = _texts(config, task, batch, sequence, seed)
        return module, {key: tensor.to(device) for key, tensor in examples.items()}


def reads_sequences(name: str) -> bool:
    """Whether a model reads text or sound, whose length a reference sets, and no images.

    Raises
    ------
    ModelError
        As of :func:`hugging_face_step`.
    """
    _require_transformers(name)
    with quiet_transformers(), _failures_named(name):
        return _task(_configuration(name), name) != "image_classification"


@contextmanager
def _failures_named(name: str) -> Iterator[None]:
    """Turn every error into one that names the model; an arbitrary configuration may raise any kind."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model hf:{name}: transformers cannot build it from its configuration ({_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    """Kind and first two lines of an error on one line; pydantic names the field in one, the fault in the other."""
    return " ".join([f"{type(error).__name__}:", *" ".join(str(error).strip().splitlines()[:2]).split()])


def _require_transformers(name: str) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ModelError(f"model hf:{name} needs the transformers package: pip install transformers") from None


def _configuration(name: str) -> Any:
    from transformers import AutoConfig

    if name in _SIZES:
        model_type, differences = _SIZES[name]
        return AutoConfig.for_model(model_type, **differences)
    path = Path(name)
    if path.suffix != ".json":
        raise ModelError(f"model hf:{name} is unknown; known are {', '.join(_SIZES)}, and paths of a config.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"model hf:{name}: the file cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"model hf:{name}: the file is not JSON ({error})") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ModelError(f"model hf:{name}: the configuration has no model_type, as the ones of transformers have")
    try:
        return AutoConfig.for_model(**content)
    except Exception as error:
        raise ModelError(f"model hf:{name}: transformers rejects the configuration ({_reason(error)})") from error


def _override(config: Any, name: str, layers: int | None, dropout: float | None) -> None:
    config.use_cache = False
    if layers is not None:
        counts = [key for key in _LAYER_COUNTS if isinstance(getattr(config, key, None), int)]
        if not counts:
            raise ModelError(f"model hf:{name}: its configuration has no number of layers that could be set")
        for key in counts:
            setattr(config, key, layers)
    if dropout is not None:
        for key, value in config.to_dict().items():
            if "drop" in key and isinstance(value, float | int) and not isinstance(value, bool):
                setattr(config, key, dropout)
        if dropout == 0 and hasattr(config, "apply_spec_augment"):
            config.apply_spec_augment = False  # it drops spans of time, drawn on the host


def _task(config: Any, name: str) -> str:
    from transformers.models.auto import modeling_auto

    tasks = {
        "sequence_to_sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "image_classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "speech_to_text": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        "audio_classification": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    }
    possible = [task for task, classes in tasks.items() if config.model_type in classes]
    if not possible:
        raise ModelError(
            f"model hf:{name}: model type {config.model_type!r} has no class with a loss for text, image or audio "
            "classification; write a function module.path:function instead"
        )
    classes = {task: _class_names(tasks[task][config.model_type]) for task in possible}
    wanted = set(config.architectures or ())
    chosen = next((task for task in possible if wanted.intersection(classes[task])), possible[0])
    if not wanted.intersection(classes[chosen]):
        config.architectures = [classes[chosen][0]]
    return chosen


def _class_names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _auto_class(task: str) -> Any:
    import transformers

    return {
        "sequence_to_sequence": transformers.AutoModelForSeq2SeqLM,
        "masked": transformers.AutoModelForMaskedLM,
        "causal": transformers.AutoModelForCausalLM,
        "image_classification": transformers.AutoModelForImageClassification,
        "speech_to_text": transformers.AutoModelForSpeechSeq2Seq,
        "audio_classification": transformers.AutoModelForAudioClassification,
    }[task]


def _texts(config: Any, task: str, batch: int, sequence: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, sequence), generator=generator)
    if task == "sequence_to_sequence":
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id or 0
        return {"input_ids": tokens, "labels": torch.randint(config.vocab_size, (batch, sequence), generator=generator)}
    if task == "masked":
        predicted = torch.rand((batch, sequence), generator=generator) < _MASKED_SHARE
        predicted[:, 0] = True  # a mean over no token is no number
        return {"input_ids": tokens, "labels": torch.where(predicted, tokens, -100)}
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images(config: Any, batch: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = getattr(config, "image_size", _IMAGE_SIZE)
    size = size if isinstance(size, list | tuple) else (size, size)
    pixels = torch.randn((batch, config.num_channels, *size), generator=generator).to(dtype)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (batch,), generator=generator)}


def _sounds(config: Any, task: str, batch: int, sequence: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Spectrograms with transcripts of ``sequence`` tokens, or waves of ``sequence`` frames with classes."""
    generator = torch.Generator().manual_seed(seed)
    if task == "speech_to_text":
        frames = 2 * config.max_source_positions  # the encoder's convolutions halve them
        features = torch.randn((batch, config.num_mel_bins, frames), generator=generator).to(dtype)
        return {
            "input_features": features,
            "labels": torch.randint(config.vocab_size, (batch, sequence), generator=generator),
        }
    waves = torch.randn((batch, sequence * config.inputs_to_logits_ratio), generator=generator).to(dtype)
    return {"input_values": waves, "labels": torch.randint(config.num_labels, (batch,), generator=generator)}
