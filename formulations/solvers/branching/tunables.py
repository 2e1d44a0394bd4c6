"""Tunables of Lagrangian probing."""

from __future__ import annotations

# price_probing.py

PROBING_FIRST_SHARE = 0.5
"""Part of the time for these steps, at most."""

PROBED_NODES = 8
"""Nodes of each round that are split in two."""

PROBING_STEPS = 10
"""Price steps of a trial, at most."""
