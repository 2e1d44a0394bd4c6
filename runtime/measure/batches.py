"""The batches of a run's steps: the model's example batch, or consecutive bytes of a text.

Every process makes the same global batch of a step by itself; nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from planner.torch_adapter.tracing.step_module import StepArguments

IGNORED_LABEL = -100


class DataError(ValueError):
    """A text that cannot be trained on, or a model that does not read text."""


@dataclass(frozen=True, eq=False)
class TextTokens:
    """Bytes of a text as token ids, and their positions among the example tensors.

    Parameters
    ----------
    ids
        Bytes modulo the vocabulary, int64.
    tokens, labels
        Positions of the token ids and of the labels among the example tensors; labels may be absent.
    shifted
        Whether a label is the token after the one at its place; otherwise the model shifts by itself and
        labels equal tokens.
    """

    ids: Tensor
    tokens: int
    labels: int | None
    shifted: bool


class Batches:
    """Global batches by step.

    Parameters
    ----------
    names, examples
        Example tensors of the step's arguments and their names.
    text
        Where the tokens come from; None: every step gets the example tensors.
    micro_batches
        Of a step, each like the examples.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        examples: tuple[Tensor, ...],
        text: TextTokens | None = None,
        micro_batches: int = 1,
    ) -> None:
        self.names, self.micro_batches = names, micro_batches
        self._examples = examples
        self._text = text

    @classmethod
    def of(
        cls,
        module: nn.Module,
        arguments: StepArguments,
        examples: tuple[Tensor, ...],
        data: Path | None,
        micro_batches: int = 1,
    ) -> Batches:
        """Batches for a module, from a text file where ``data`` names one.

        Raises
        ------
        DataError
            If the file cannot be read or is too short, or the model takes no token ids.
        """
        text = None if data is None else _read_text(module, arguments.names, examples, data)
        return cls(arguments.names, examples, text, micro_batches)

    def of_step(self, step: int) -> dict[str, Tensor]:
        """Global tensors of step ``step`` (from 0) by name; those of several micro-batches are stacked."""
        first = step * self.micro_batches
        parts = [self.tensors(first + at) for at in range(self.micro_batches)]
        found = parts[0] if len(parts) == 1 else [torch.stack(tensors) for tensors in zip(*parts, strict=True)]
        return dict(zip(self.names, found, strict=True))

    def tensors(self, step: int) -> list[Tensor]:
        """Global tensors of micro-batch ``step`` (from 0) among those of all steps, in the order of the names."""
        batch = list(self._examples)
        if self._text is None:
            return batch
        tokens = self._examples[self._text.tokens]
        rows, length = tokens.shape
        last = len(self._text.ids) - length - 1
        starts = [(step * rows + row) * length % (last + 1) for row in range(rows)]
        batch[self._text.tokens] = torch.stack([self._text.ids[start : start + length] for start in starts])
        if self._text.labels is not None:
            shift = int(self._text.shifted)
            labels = torch.stack([self._text.ids[start + shift : start + shift + length] for start in starts])
            ignored = self._examples[self._text.labels] == IGNORED_LABEL
            batch[self._text.labels] = labels.masked_fill(ignored, IGNORED_LABEL)
        return batch


def _read_text(module: nn.Module, names: tuple[str, ...], examples: tuple[Tensor, ...], data: Path) -> TextTokens:
    try:
        content = data.read_bytes()
    except OSError as error:
        raise DataError(f"data {data} cannot be read ({error.strerror}): give a text file") from error
    matrices = [
        position
        for position, tensor in enumerate(examples)
        if tensor.dtype == torch.int64 and tensor.ndim == 2 and not names[position].endswith("labels")
    ]
    named = [position for position in matrices if names[position].endswith("input_ids")]
    if not matrices:
        raise DataError(f"data {data}: the model takes no token ids ({', '.join(names)}); leave --data out")
    tokens = (named or matrices)[0]
    shape = examples[tokens].shape
    labels = next(
        (k for k, name in enumerate(names) if name.endswith("labels") and examples[k].shape == shape),
        None,
    )
    if len(content) < shape[1] + 2:
        raise DataError(f"data {data} has {len(content)} bytes, a sequence has {shape[1]} tokens: give a longer text")
    ids = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(torch.int64) % _vocabulary(module)
    shifted = labels is not None and not _equal_where_counted(examples[labels], examples[tokens])
    return TextTokens(ids, tokens, labels, shifted)


def _equal_where_counted(labels: Tensor, tokens: Tensor) -> bool:
    return bool(((labels == tokens) | (labels == IGNORED_LABEL)).all())


def _vocabulary(module: nn.Module) -> int:
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    if not tables:
        raise DataError("the model has no embedding table, so its vocabulary is not known; leave --data out")
    return tables[0].num_embeddings
