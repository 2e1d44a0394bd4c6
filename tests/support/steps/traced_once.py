"""Traced steps of references, each traced once in a process where its model is the same in all tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from planner.models.references import ModelReference, load_step
from planner.strategies.traced_step import TracedStep, trace_step

CONSTANT = ("hf:", "support.")
"""Sources of models that no test changes; other functions may be of a file that a test wrote."""


def traced_once(reference: ModelReference) -> TracedStep:
    """The traced step of a reference."""
    path = Path(reference.source.removeprefix("hf:"))
    trace = _traced if reference.source.startswith(CONSTANT) else _traced.__wrapped__
    return trace(reference, path.read_text(encoding="utf-8") if path.is_file() else "")


@cache
def _traced(reference: ModelReference, configuration: str) -> TracedStep:
    step = load_step(reference)
    return trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn, reference.reduce_dtype)
