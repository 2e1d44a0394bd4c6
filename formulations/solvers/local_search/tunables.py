"""Tunables of local search: one table per member."""

from __future__ import annotations

# incumbent_search.py

FILL_FACTORS = (1.0, 0.7, 0.4, 0.0)
"""Factors of the prices while memory is filled, one after another."""

REPAIRED_ROWS = 400
"""Rows over their limit that one repair brings down, at most."""

FORCED_CHUNK = 50
"""Moves of the search for anything feasible between looks at the clock."""
