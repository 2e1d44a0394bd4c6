"""The error of everything that loads a model."""

from __future__ import annotations


class ModelError(ValueError):
    """The model that is named cannot be loaded; the message says why and what to do."""
