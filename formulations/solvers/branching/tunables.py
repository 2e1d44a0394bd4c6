"""Tunables of branching."""

from __future__ import annotations

# branch_and_bound.py

WORTH_PRESOLVING = 0.9
"""Share of the columns of a root up to which what fixing and presolve leave is searched instead, and of the gap that
the last incumbent left there up to which a better one is worth another try."""
