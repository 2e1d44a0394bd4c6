"""Tunables of large neighbourhood search: one table per member."""

from __future__ import annotations

# large_neighbourhood.py

FIRST_COLUMNS = 15_000
"""Columns of the linear models of the first parts."""

START_SHARE = 0.2
"""Part of the time for prices and a first assignment."""

LEAST_COLUMNS = 2_000
"""Columns of a part, at least."""

PART_SHARE = 0.05
"""Part of the time limit that one part may take, though a second at least."""

MOST_PART_SECONDS = 5.0
"""Seconds of a part, at most."""

QUICK_SHARE = 0.3
"""Part of its seconds below which a part was quick, so that the next may grow."""

GROWTH = 1.5
"""Factor of the columns after a quick part; they are divided by it after one that was not solved in time."""

MEMORY_OF_GAINS = 0.7
"""Weight of earlier gains per second beside that of the last part."""

CURIOSITY = 0.15
"""Part of the draws of a kind that do not look at gains."""

NEGLIGIBLE_GAP = 1e-4
"""Part of the gap of the whole problem; a part need not be solved closer."""

COARSEST_GAP = 1e-3
"""Relative gap of a part, at most."""
