"""A language model's loss in chunks of the sequence, so that no moment needs the logits of all tokens.

In a step with a large vocabulary the largest tensors are the logits and those that the loss saves: they, not the
layers, are then the lower bound of memory. In chunks the head and the loss are operators of their own for every part
of the sequence, and a planner that recomputes can run those of one chunk again right before its backward. The loss is
the same sum over the same tokens.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.common.model_error import ModelError

IGNORED = -100
"""Label of tokens that count nowhere, as everywhere in torch and transformers."""


def chunk_loss(module: nn.Module, name: str, chunks: int) -> None:
    """Make a causal language model of transformers compute head and loss chunk by chunk.

    Parameters
    ----------
    module
        With output embeddings and a settable ``loss_function``, as causal language models have them; changed in place.
        Its output then holds hidden states in place of logits.
    name
        For messages.
    chunks
        Parts of the sequence, as equal as it divides.

    Raises
    ------
    ModelError
        If the model has no such head.
    """
    embeddings = getattr(module, "get_output_embeddings", None)
    found = None if embeddings is None else embeddings()
    if not isinstance(found, nn.Linear) or not hasattr(module, "loss_function"):
        raise ModelError(
            f"model hf:{name}: its loss cannot be computed in chunks, which needs a causal language model with a "
            "linear head; leave --loss-chunks out"
        )
    head = found

    def loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return chunked_cross_entropy(logits, head, labels, chunks)

    head.forward = MethodType(_deferred, head)  # type: ignore[method-assign]  # parameters, ties and names stay
    module.loss_function = loss  # type: ignore[assignment]  # a property of every causal language model


def chunked_cross_entropy(hidden: Tensor, head: nn.Linear, labels: Tensor, chunks: int) -> Tensor:
    """Mean loss of predicting every next token.

    Parameters
    ----------
    hidden
        ``(batch, sequence, width)``.
    head
        From hidden states to logits.
    labels
        ``(batch, sequence)`` tokens; :data:`IGNORED` counts nowhere.
    chunks
        Parts of the sequence.
    """
    following = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    length = -(-hidden.shape[1] // chunks)
    sums = [
        functional.cross_entropy(
            functional.linear(part, head.weight, head.bias).flatten(0, 1).float(),
            tokens.flatten(),
            reduction="sum",
            ignore_index=IGNORED,
        )
        for part, tokens in zip(_parts(hidden, length), _parts(following, length), strict=True)
    ]
    return torch.stack(sums).sum() / (following != IGNORED).sum()


def _deferred(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Output of the replaced head: hidden states, to which the loss applies the head chunk by chunk."""
    return hidden


def _parts(tensor: Tensor, length: int) -> tuple[Tensor, ...]:
    """Parts of the sequence, of this length but for the last."""
    parts: tuple[Tensor, ...] = torch.split(tensor, length, dim=1)
    return parts
