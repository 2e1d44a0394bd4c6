"""Tunables of the exact solvers: one table per member."""

from __future__ import annotations

# lazy_rows.py

ROWS_PER_ROUND = 12
"""Violated rows of a resource that one round adds, at most."""

EAGER_ENTRIES = 20_000
"""Rows times columns up to which all rows are there from the start."""

RELATIVE_EXCESS = 1e-7
"""Not tunable: excess, as a part of the limit, above which a row counts as violated in doubles."""

# highs_session.py

LARGEST_SCALED_COST = 1 << 20
"""Not tunable: costs are divided by a power of two until the largest is about this, for HiGHS's tolerances."""

# cpsat.py

EAGER_TERMS = 2_000_000
"""Times times uses of a resource up to which all its constraints are written out."""

# brute_force.py

CHUNK = 1 << 14
"""Not tunable: assignments that are evaluated at once; they take a few megabytes."""
