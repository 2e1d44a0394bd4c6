"""Tunables of peaks: one table per member."""

from __future__ import annotations

# minimum_peak.py

MOST_COLUMNS = 5000
"""Columns of the linear model of what presolve leaves, up to which CP-SAT solves it."""

PEAK_FIRST_SHARE = 0.4
"""Part of the time for a first assignment."""

PEAK_SEARCH_SHARE = 0.6
"""Part of the time after which the search from it ends."""

PEAK_MOMENTS_SHARE = 0.75
"""Part of the time after which bounds at the busiest moments end."""

PEAK_LEAST_SECONDS = 0.05
"""Not tunable: seconds below which no further solver has the time to begin."""

# falling_limit.py

FALLING_FIRST_SHARE = 0.5
"""Part of the way to the lowest limit that the first step takes."""

FALLING_LARGEST_SHARE = 0.8
"""The same for any step, at most."""

FIRST_PATIENCE = 0.25
"""Moves per node after which the search gives up on a limit."""

MORE_PATIENCE = 1.4
"""Factor of these moves after each failure."""

# prices.py

FEASIBILITY_LOCAL_SHARE = 0.5
"""Part of the time after which the local search and the second presolve end."""

FEASIBILITY_STEPS_PER_NODE = 2
"""Moves of the local search for each node."""

FEASIBILITY_PRICE_STEPS = 200
"""Price steps after which there is a gap that prices do not close."""
