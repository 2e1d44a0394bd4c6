"""The error of everything that is wrong with a plan."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan that cannot be read, does not fit, or fails a check; the message names the remedy."""
