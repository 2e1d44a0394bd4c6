"""Tunables of local search: one table per member."""

from __future__ import annotations

# incumbent_search.py

FILL_FACTORS = (1.0, 0.7, 0.4, 0.0)
"""Factors of the prices while memory is filled, one after another."""

REPAIRED_ROWS = 400
"""Rows over their limit that one repair brings down, at most."""

FORCED_CHUNK = 50
"""Moves of the search for anything feasible between looks at the clock."""

# isolated_moves.py

EXCHANGE_WORK = 1 << 18
"""Takers times nodes that they look at, for the exchanges of one call."""

KNAPSACKS_AT_ONCE = 8
"""Full rows for which knapsacks are solved in one call."""

FULL_FROM = 0.95
"""Part of its limit from which on a row is full."""

LONGEST_PAUSE = 64
"""Calls without knapsacks after calls in which they gained nothing, at most."""

HOPED_GAIN = 1.5
"""Gain hoped for, over that of the last call."""

# multiple_choice_knapsack.py

EXCHANGE_LISTS = 256
"""Blocks of rows, each with a list of the nodes that use it."""
