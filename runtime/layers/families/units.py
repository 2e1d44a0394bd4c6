"""Units, the parts of every model family: each is a layer of a plan, called one after the other.

A unit holds modules of the user's model and calls them as the model's own forward does. Units pass tuples of tensors
to each other, so a stage of a pipeline is a run of units, and hidden states can be resharded between any two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

IGNORED_LABEL = -100
"""Label that the loss does not count, as in :func:`torch.nn.functional.cross_entropy`."""


class FamilyError(ValueError):
    """A model that the layer executor does not support, or not with these settings; the message gives the reason."""


class Carried(Enum):
    """Kind of a tensor between two units, which determines its placement on the stage's devices.

    ``HIDDEN``: batch x sequence x width, sharded along the sequence where the unit is sequence-parallel. ``BATCH``:
    its first dimension is the batch, nothing else is sharded. ``SHARED``: the same on all devices, for all rows of the
    batch; its gradient on a device is this device's share, that of its rows and heads, so the sum over devices is
    complete.
    """

    HIDDEN = "hidden"
    BATCH = "batch"
    SHARED = "shared"


@dataclass(frozen=True)
class TensorRules:
    """Modules of a unit by their treatment under tensor parallelism; paths relative to the unit, where they exist.

    Parameters
    ----------
    column, row
        Linear modules that are split along their output and their input.
    norms
        Modules that work on each token by itself, sharded along the sequence under sequence parallelism.
    attention
        Modules whose first argument must be whole sequences.
    fused
        Column modules whose output is several equal matrices side by side, with their number.
    vocabulary
        Embedding tables and output projections that are split along the vocabulary.
    replicated_tables
        Embedding tables that every device holds whole though it uses a part of their columns.
    own_calls
        Modules that the unit calls itself, before it calls the module that they are in.
    """

    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    fused: Mapping[str, int] | None = None
    vocabulary: tuple[str, ...] = ()
    replicated_tables: tuple[str, ...] = ()
    own_calls: tuple[str, ...] = ()


class LayerUnit(nn.Module, ABC):
    """One layer of a plan.

    Parameters
    ----------
    name
        Module path of a block; ``embedding``, ``bridge`` or ``head`` for the modules around the blocks.
    takes, gives
        Kinds of the tensors of its arguments and of its result.
    rules
        Treatment of its modules under tensor parallelism.
    heads
        Attention heads, which the degree of tensor parallelism must divide; 0 where there are none.

    Attributes
    ----------
    roles
        Modules of a block by role: ``attention``, ``mlp``, ``cross_attention``.
    is_block
        Whether its modules may be layers of their own.
    tensor_rank, tensor_size
        This device's place among those that share the unit's products, and their number.
    sequence_parts
        Devices that share every sequence of hidden states between the unit's products.
    copies
        Devices that compute the whole unit for the same rows.
    """

    takes: tuple[Carried, ...] = (Carried.HIDDEN,)
    gives: tuple[Carried, ...] = (Carried.HIDDEN,)
    rules = TensorRules()
    roles: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    is_block = True

    def __init__(self, name: str, heads: int = 0) -> None:
        super().__init__()
        self.name = name
        self.heads = heads
        self.tensor_rank, self.tensor_size = 0, 1
        self.sequence_parts = 1
        self.copies = 1

    @abstractmethod
    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Result of the unit on local tensors."""

    def length(self, hidden: Tensor) -> int:
        """Length of the whole sequences of local hidden states."""
        return hidden.shape[1] * self.sequence_parts

    def check_heads(self, size: int) -> None:
        """Check that the heads can be shared by `size` devices.

        Raises
        ------
        FamilyError
            They cannot.
        """
        if self.heads % size:
            raise FamilyError(
                f"layer {self.name} has {self.heads} attention heads, tensor-parallel {size} does not divide them: "
                f"possible are {', '.join(str(k) for k in range(1, self.heads + 1) if self.heads % k == 0)}"
            )

    def share_heads(self, rank: int, size: int) -> None:
        """Set the unit's modules to one of `size` equal parts of the heads."""
        self.tensor_rank, self.tensor_size = rank, size


@dataclass(frozen=True, eq=False)
class ModelFamily:
    """A model as units.

    Parameters
    ----------
    units
        In the order in which they run.
    arguments
        Names of the step's arguments that the units support.
    inputs
        Inputs of the first unit, from the step's arguments; all have the batch first.
    targets
        Labels as the loss counts them, one for each row of the last unit's output without its last dimension.
    float_loss
        Whether the model computes its loss in 32 bits.
    sequence
        Lengths of the hidden states' sequences for the step's arguments.
    dropout
        Largest dropout probability.
    """

    units: tuple[LayerUnit, ...]
    arguments: tuple[str, ...]
    inputs: Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]
    targets: Callable[[Mapping[str, Tensor]], Tensor]
    float_loss: bool
    sequence: Callable[[Mapping[str, Tensor]], tuple[int, ...]]
    dropout: float


def causal_mask(hidden: Tensor, length: int) -> Tensor:
    """Additive mask (1, 1, length, length) under which a token attends to itself and to those before it."""
    lowest = torch.finfo(hidden.dtype).min
    return torch.full((length, length), lowest, dtype=hidden.dtype, device=hidden.device).triu(1)[None, None]


def causal_mask_of(attention: Any, hidden: Tensor, length: int) -> Tensor | None:
    """Mask for an attention module of transformers; None where its kernel is causal by itself if given none."""
    kind: str = attention.config._attn_implementation
    return None if kind == "sdpa" or "flash" in kind else causal_mask(hidden, length)


_OTHER_HEADS = ("summary_first_dropout", "classifier_dropout")
"""Probabilities of heads for other tasks; a head that a model has is among its modules."""


def largest_dropout(module: nn.Module) -> float:
    """Largest probability with which a module of the model, or its attention, drops values."""
    config = getattr(module, "config", None)
    settings = config.to_dict() if config is not None else {}
    named = [
        float(value)
        for key, value in settings.items()
        if "drop" in key and key not in _OTHER_HEADS and isinstance(value, float | int) and not isinstance(value, bool)
    ]
    return max([part.p for part in module.modules() if isinstance(part, nn.Dropout)] + named, default=0.0)
