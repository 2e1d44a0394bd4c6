"""Errors of the library: each message names the input, its value and the remedy."""

from __future__ import annotations


class LoadError(ValueError):
    """A plan, module or device that cannot be trained with as given."""


class BatchError(ValueError):
    """A batch whose tensors are not those of the planned step."""


class WeightsError(ValueError):
    """Weights that cannot be read, or are not those of the model."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or continued."""
