"""Encoders as units: transformers' ``BertForMaskedLM`` and ``ViTForImageClassification``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import Tensor

from runtime.layers.families.units import Carried, FamilyError, LayerUnit, ModelFamily, TensorRules, largest_dropout


class BertEmbedding(LayerUnit):
    """Sum of token, position and type embeddings, and its norm."""

    takes = (Carried.BATCH,)
    rules = TensorRules(vocabulary=("embeddings.word_embeddings",))
    is_block = False

    def __init__(self, name: str, embeddings: Any) -> None:
        super().__init__(name)
        self.embeddings = embeddings

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Hidden states of token ids."""
        return (self.embeddings(input_ids=carried[0]),)


class BertBlock(LayerUnit):
    """One layer of the encoder."""

    rules = TensorRules(
        column=(
            "block.attention.self.query",
            "block.attention.self.key",
            "block.attention.self.value",
            "block.intermediate.dense",
        ),
        row=("block.attention.output.dense", "block.output.dense"),
        norms=("block.attention.output.LayerNorm", "block.output.LayerNorm"),
        attention=("block.attention.self",),
    )

    roles = MappingProxyType({"attention": ("block.attention",), "mlp": ("block.intermediate", "block.output")})

    def __init__(self, name: str, block: Any) -> None:
        super().__init__(name, block.attention.self.num_attention_heads)
        self.block = block

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Hidden states after the layer."""
        return (self.block(carried[0]),)


class BertHead(LayerUnit):
    """Prediction of the masked tokens."""

    gives = (Carried.BATCH,)
    rules = TensorRules(vocabulary=("predictions.predictions.decoder",))
    is_block = False

    def __init__(self, name: str, predictions: Any) -> None:
        super().__init__(name)
        self.predictions = predictions

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Logits."""
        return (self.predictions(carried[0]),)


class VitEmbedding(LayerUnit):
    """Patches, class token and positions; every device of a tensor-parallel group computes them whole."""

    takes = (Carried.BATCH,)
    is_block = False

    def __init__(self, name: str, embeddings: Any) -> None:
        super().__init__(name)
        self.embeddings = embeddings

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Hidden states of pixels."""
        return (self.embeddings(carried[0]),)


class VitBlock(LayerUnit):
    """One layer of the encoder."""

    rules = TensorRules(
        column=("block.attention.q_proj", "block.attention.k_proj", "block.attention.v_proj", "block.mlp.fc1"),
        row=("block.attention.o_proj", "block.mlp.fc2"),
        norms=("block.layernorm_before", "block.layernorm_after"),
        attention=("block.attention",),
    )

    roles = MappingProxyType({"attention": ("block.attention",), "mlp": ("block.mlp",)})

    def __init__(self, name: str, block: Any) -> None:
        super().__init__(name, block.attention.num_attention_heads)
        self.block = block

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Hidden states after the layer."""
        return (self.block(carried[0]),)


class VitHead(LayerUnit):
    """Last norm and the classifier of the class token, whole on every device of a tensor-parallel group."""

    gives = (Carried.BATCH,)
    is_block = False

    def __init__(self, name: str, norm: Any, classifier: Any) -> None:
        super().__init__(name)
        self.norm, self.classifier = norm, classifier

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Logits."""
        return (self.classifier(self.norm(carried[0])[:, 0]),)


def bert_family(model: Any) -> ModelFamily:
    """Units of a BERT masked language model.

    Raises
    ------
    FamilyError
        It is a decoder, or splits its MLP along the sequence.
    """
    if model.config.is_decoder or model.config.chunk_size_feed_forward:
        raise FamilyError("BERT with is_decoder or chunk_size_feed_forward has no layer executor: unset it")
    blocks = [BertBlock(f"bert.encoder.layer.{index}", block) for index, block in enumerate(model.bert.encoder.layer)]
    return ModelFamily(
        units=(BertEmbedding("embedding", model.bert.embeddings), *blocks, BertHead("head", model.cls)),
        arguments=("input_ids", "labels"),
        inputs=lambda batch: (batch["input_ids"],),
        targets=lambda batch: batch["labels"],
        float_loss=False,
        sequence=lambda batch: (batch["input_ids"].shape[1],),
        dropout=largest_dropout(model),
    )


def vit_family(model: Any) -> ModelFamily:
    """Units of a ViT image classifier.

    Raises
    ------
    FamilyError
        It is trained on anything but one class for each image.
    """
    if model.config.num_labels < 2 or model.config.problem_type not in (None, "single_label_classification"):
        raise FamilyError("the layer executor trains ViT on one class for each image: set num_labels to 2 or more")
    blocks = [VitBlock(f"vit.layers.{index}", block) for index, block in enumerate(model.vit.layers)]
    positions = model.vit.embeddings.position_embeddings.shape[1]
    return ModelFamily(
        units=(
            VitEmbedding("embedding", model.vit.embeddings),
            *blocks,
            VitHead("head", model.vit.layernorm, model.classifier),
        ),
        arguments=("pixel_values", "labels"),
        inputs=lambda batch: (batch["pixel_values"],),
        targets=lambda batch: batch["labels"],
        float_loss=False,
        sequence=lambda batch: (positions,),
        dropout=largest_dropout(model),
    )
