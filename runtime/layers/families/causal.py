"""Common parts of causal language models as units: the head, and inputs and labels from tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from runtime.layers.families.units import IGNORED_LABEL, Carried, LayerUnit, ModelFamily, TensorRules, largest_dropout


class LanguageModelHead(LayerUnit):
    """Last norm and output projection."""

    gives = (Carried.BATCH,)
    rules = TensorRules(vocabulary=("projection",))
    is_block = False

    def __init__(self, name: str, norm: nn.Module, projection: nn.Module) -> None:
        super().__init__(name)
        self.norm, self.projection = norm, projection

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Logits."""
        (hidden,) = carried
        return (self.projection(self.norm(hidden)),)


def causal_family(model: Any, embedding: LayerUnit, blocks: Sequence[LayerUnit], norm: nn.Module) -> ModelFamily:
    """Units of a model that predicts every token from those before it.

    Parameters
    ----------
    model
        The model, with its output projection ``lm_head``.
    embedding, blocks, norm
        Its units, and the norm in front of the projection.
    """
    return ModelFamily(
        units=(embedding, *blocks, LanguageModelHead("head", norm, model.lm_head)),
        arguments=("input_ids", "labels"),
        inputs=lambda batch: (batch["input_ids"],),
        targets=lambda batch: nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL),
        float_loss=True,
        sequence=lambda batch: (batch["input_ids"].shape[1],),
        dropout=largest_dropout(model),
    )
