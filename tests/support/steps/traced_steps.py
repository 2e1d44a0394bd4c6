"""Traced training steps of every kind, small enough to run, by name."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from support.steps import models

from planner.models.references import ModelReference, load_step
from planner.strategies.traced_step import TracedStep, trace_step

TRANSFORMERS = ("gpt2", "llama", "bert", "vit", "t5")
OWN_STEPS = {
    "dropout_gpt": models.dropout_gpt,
    "conv_net": models.conv_net,
    "res_net": models.res_net,
    "mixture_of_experts": models.mixture_of_experts,
}
DROPOUT = {"gpt2": 0.0, "vit": 0.0}
"""Without dropout attention runs as one kernel; the others keep their own probabilities."""
ALL_STEPS = (*TRANSFORMERS, *OWN_STEPS)


@cache
def traced_step(name: str) -> TracedStep:
    """The traced step called ``name``; each is traced once."""
    if name in OWN_STEPS:
        module, args, kwargs, loss = OWN_STEPS[name]()
        return trace_step(module, args, kwargs, loss)
    with tempfile.TemporaryDirectory() as folder:
        source = models.write_configuration(Path(folder), name)
        step = load_step(
            ModelReference(source, batch=4, sequence=16, dtype="float32", seed=0, dropout=DROPOUT.get(name))
        )
    return trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn)
