"""Models to fold into layers: those of :mod:`.models`, attention written out, and stacks of unequal blocks."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from support.steps import models

from planner.models.references import ModelReference, TrainingStep, load_step
from planner.strategies.traced_step import TracedStep, trace_step

SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 8,
}
TRANSFORMERS = ("gpt2", "bert", "t5", "vit", "swin")
OWN = ("res_net", "conv_net", "tied_gpt", "mlp", "experts")
SEQUENCE = 16


def experts(batch: int = 4) -> models.Step:
    """Transformer whose second block has experts in the place of its feed-forward module."""
    model, args, kwargs, loss = models.gpt(batch)
    model.layers[1].mlp = models.MixtureOfExperts(width=32)
    return model, args, kwargs, loss


@cache
def training_step(name: str, batch: int) -> TrainingStep:
    """The step called ``name`` with so many samples."""
    if name in OWN:
        return TrainingStep(*(experts if name == "experts" else getattr(models, name))(batch))
    configuration = SWIN if name == "swin" else models.SMALL_CONFIGURATIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps({"model_type": name, **configuration}), encoding="utf-8")
        return load_step(ModelReference(f"hf:{path}", batch=batch, sequence=SEQUENCE))


@cache
def traced_batch(name: str, batch: int) -> TracedStep:
    """The traced step of so many samples; each is traced once."""
    step = training_step(name, batch)
    return trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)
