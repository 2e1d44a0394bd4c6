"""Tunables of branching and of Lagrangian probing."""

from __future__ import annotations

# branch_and_bound.py

WORTH_PRESOLVING = 0.9
"""Share of the columns of a root up to which what fixing and presolve leave is searched instead, and of the gap that
the last incumbent left there up to which a better one is worth another try."""

# price_probing.py

PROBING_FIRST_SHARE = 0.5
"""Part of the time for these steps, at most."""

PROBED_NODES = 8
"""Nodes of each round that are split in two."""

PROBING_STEPS = 10
"""Price steps of a trial, at most."""
