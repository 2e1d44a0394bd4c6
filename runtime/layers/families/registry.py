"""Model families that the layer executor supports, and the names of their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.models.references import TrainingStep
from runtime.layers.families.encoders import bert_family, vit_family
from runtime.layers.families.gpt2 import gpt2_family
from runtime.layers.families.llama import llama_family
from runtime.layers.families.t5 import t5_family
from runtime.layers.families.units import FamilyError, ModelFamily

FAMILIES: dict[str, Callable[[Any], ModelFamily]] = {
    "GPT2LMHeadModel": gpt2_family,
    "LlamaForCausalLM": llama_family,
    "BertForMaskedLM": bert_family,
    "ViTForImageClassification": vit_family,
    "T5ForConditionalGeneration": t5_family,
}
"""Makers of a model's units by the name of its class in transformers."""


def model_family(step: TrainingStep) -> ModelFamily:
    """Units of a training step's module.

    Raises
    ------
    FamilyError
        There are none for its class, or its step has arguments or a loss that the units do not support.
    """
    kind = type(step.module).__name__
    if kind not in FAMILIES:
        raise FamilyError(
            f"the layer executor cannot cut a {kind} into layers; it supports {', '.join(FAMILIES)}. Any other model "
            "runs with an operator plan"
        )
    family = FAMILIES[kind](step.module)
    if step.example_args or set(step.example_kwargs) != set(family.arguments):
        raise FamilyError(
            f"the layer executor runs a {kind} with the arguments {', '.join(family.arguments)}, by name; the step has "
            f"{len(step.example_args)} positional and {', '.join(step.example_kwargs)}"
        )
    if step.loss_fn is not None:
        raise FamilyError(f"the layer executor computes the loss of a {kind} itself: leave loss_fn out")
    return family
