"""Tunables of local search; what compiled loops read stands beside them, since it is compiled in."""

from __future__ import annotations

# incumbent_search.py

FILL_FACTORS = (1.0, 0.7, 0.4, 0.0)
"""Factors of the prices while memory is filled, one after another."""

REPAIRED_ROWS = 400
"""Rows over their limit that one repair brings down, at most."""

FORCED_STEPS = 2000
"""Moves of a search for anything feasible, where it is one method of several."""

MOVES_AT_ONCE = 200
"""Not tunable: moves between looks at the clock; they take milliseconds."""
