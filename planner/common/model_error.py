"""The error of everything that loads a model."""

from __future__ import annotations


class ModelError(ValueError):
    """The named model cannot be loaded; the message names the reason and the remedy."""
