"""T5 as units: transformers' ``T5ForConditionalGeneration``.

The first block of each stack computes the position bias that the others add to their scores, so the bias goes along
with the hidden states. The decoder's embeddings are made with the encoder's, where the shared table is, and wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from runtime.layers.families.units import (
    IGNORED_LABEL,
    Carried,
    LayerUnit,
    ModelFamily,
    TensorRules,
    causal_mask,
    largest_dropout,
)

_ATTENTIONS = ("block.layer.0.SelfAttention", "block.layer.1.EncDecAttention")
_BIAS_TABLE = "block.layer.0.SelfAttention.relative_attention_bias"
_MLPS = ("block.layer.1.DenseReluDense", "block.layer.2.DenseReluDense")


class T5Embedding(LayerUnit):
    """Embeddings of the encoder's and the decoder's tokens."""

    takes = (Carried.BATCH, Carried.BATCH)
    gives = (Carried.HIDDEN, Carried.HIDDEN)
    rules = TensorRules(vocabulary=("table",))
    is_block = False

    def __init__(self, name: str, model: Any) -> None:
        super().__init__(name)
        self.table = model.shared
        self.encoder_dropout, self.decoder_dropout = model.encoder.dropout, model.decoder.dropout

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Hidden states of the encoder and of the decoder."""
        tokens, decoder_tokens = carried
        return self.encoder_dropout(self.table(tokens)), self.decoder_dropout(self.table(decoder_tokens))


class T5Block(LayerUnit):
    """One block of either stack.

    Parameters
    ----------
    name, stack, index
        Name of the block, its stack, and its index there.
    """

    rules = TensorRules(
        column=(
            *(f"{attention}.{matrix}" for attention in _ATTENTIONS for matrix in "qkv"),
            *(f"{mlp}.{matrix}" for mlp in _MLPS for matrix in ("wi", "wi_0", "wi_1")),
        ),
        row=(*(f"{attention}.o" for attention in _ATTENTIONS), *(f"{mlp}.wo" for mlp in _MLPS)),
        norms=tuple(f"block.layer.{position}.layer_norm" for position in range(3)),
        attention=_ATTENTIONS,
        replicated_tables=(_BIAS_TABLE,),
        own_calls=(_BIAS_TABLE,),
    )

    def __init__(self, name: str, stack: Any, index: int) -> None:
        super().__init__(name, stack.block[index].layer[0].SelfAttention.n_heads)
        self.block = stack.block[index]
        self.is_decoder = bool(stack.is_decoder)
        self.is_first, self.is_last = index == 0, index == len(stack.block) - 1
        mlp = "block.layer.2" if self.is_decoder else "block.layer.1"
        self.roles = {"attention": ("block.layer.0",), "mlp": (mlp,)}
        if self.is_decoder:
            self.roles["cross_attention"] = ("block.layer.1",)
        waiting = Carried.BATCH if self.is_decoder else Carried.HIDDEN
        self.takes = (Carried.HIDDEN, waiting, Carried.SHARED)
        self.gives = (Carried.HIDDEN, waiting, Carried.SHARED)
        if self.is_first:
            self.takes = (Carried.BATCH, Carried.HIDDEN) if self.is_decoder else (Carried.HIDDEN, Carried.HIDDEN)
        if self.is_last:
            self.gives = (Carried.HIDDEN,) if self.is_decoder else (Carried.HIDDEN, Carried.HIDDEN)

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Hidden states after the block; then carried tensors and the position bias, where a later block needs them.

        Decoder embeddings are carried through the encoder, and the encoder's result through the decoder.
        """
        hidden, waiting = carried[:2]
        if self.is_decoder and self.is_first:
            waiting, hidden = carried
        bias = self._position_bias(hidden) if self.is_first else carried[2]
        part = self.heads // self.tensor_size
        hidden = self.block(
            hidden,
            attention_mask=causal_mask(hidden, self.length(hidden)) if self.is_decoder else None,
            position_bias=self._own_share(bias)[:, self.tensor_rank * part : (self.tensor_rank + 1) * part],
            encoder_hidden_states=waiting if self.is_decoder else None,
        )[0]
        if self.is_last:
            return (hidden,) if self.is_decoder else (hidden, waiting)
        return hidden, waiting, bias

    def share_heads(self, rank: int, size: int) -> None:
        """As in :class:`LayerUnit`."""
        super().share_heads(rank, size)
        for module in self.block.modules():
            if hasattr(module, "key_value_proj_dim"):
                module.n_heads //= size
                module.inner_dim //= size

    def _own_share(self, bias: Tensor) -> Tensor:
        """The bias with a gradient that is this device's share of that of all devices which compute the same."""
        if self.copies == 1 or not bias.requires_grad:
            return bias
        shared = bias.view_as(bias)
        shared.register_hook(lambda gradient: gradient / self.copies)  # type: ignore[no-untyped-call]
        return shared

    def _position_bias(self, hidden: Tensor) -> Tensor:
        length = self.length(hidden)
        bias: Tensor = self.block.layer[0].SelfAttention.compute_bias(length, length, device=hidden.device)
        return bias.contiguous()  # as a later stage receives it


class T5Bridge(LayerUnit):
    """Last norm of the encoder, which also returns the decoder's embeddings."""

    takes = (Carried.HIDDEN, Carried.HIDDEN)
    gives = (Carried.HIDDEN, Carried.HIDDEN)
    is_block = False

    def __init__(self, name: str, encoder: Any) -> None:
        super().__init__(name)
        self.norm, self.dropout = encoder.final_layer_norm, encoder.dropout

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Result of the encoder, and the decoder's embeddings."""
        hidden, waiting = carried
        return self.dropout(self.norm(hidden)), waiting


class T5Head(LayerUnit):
    """Last norm of the decoder and output projection."""

    gives = (Carried.BATCH,)
    rules = TensorRules(vocabulary=("projection",))
    is_block = False

    def __init__(self, name: str, model: Any) -> None:
        super().__init__(name)
        self.norm, self.dropout = model.decoder.final_layer_norm, model.decoder.dropout
        self.projection = model.lm_head
        scaled = getattr(model.config, "scale_decoder_outputs", model.config.tie_word_embeddings)
        self.scale = model.model_dim**-0.5 if scaled else 1.0

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Logits."""
        return (self.projection(self.dropout(self.norm(carried[0])) * self.scale),)


def t5_family(model: Any) -> ModelFamily:
    """Units of a T5 model with a language modelling head."""
    config = model.config

    def decoder_tokens(batch: Mapping[str, Tensor]) -> Tensor:
        """Labels shifted right: the input of the decoder."""
        labels = batch["labels"]
        shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=config.decoder_start_token_id)
        return shifted.masked_fill(shifted == IGNORED_LABEL, config.pad_token_id)

    def blocks(name: str, stack: Any) -> list[T5Block]:
        return [T5Block(f"{name}.block.{index}", stack, index) for index in range(len(stack.block))]

    return ModelFamily(
        units=(
            T5Embedding("embedding", model),
            *blocks("encoder", model.encoder),
            T5Bridge("bridge", model.encoder),
            *blocks("decoder", model.decoder),
            T5Head("head", model),
        ),
        arguments=("input_ids", "labels"),
        inputs=lambda batch: (batch["input_ids"], decoder_tokens(batch)),
        targets=lambda batch: batch["labels"],
        float_loss=False,
        sequence=lambda batch: (batch["input_ids"].shape[1], batch["labels"].shape[1]),
        dropout=largest_dropout(model),
    )
