"""Tunables of the portfolio: one table per member."""

from __future__ import annotations

# lanes.py

MOST_COLUMNS = 150_000
"""Columns of the linear model up to which branch and bound starts at once."""

TINY_COLUMNS = 2_000
"""Columns up to which branch and bound is mostly done before another process is up."""

HEAD_START_SECONDS = 0.5
"""Seconds that branch and bound then has before prices begin, and patterns before branch and bound."""

MOST_NODES_IN_PARTS = 12_000
"""Nodes up to which exact parts improve more than further moves at prices."""

LEAST_NODES_OF_COLUMNS = 500
"""Nodes from which on patterns find more than prices, where most nodes repeat."""

ITERATIONS_ALONE = 200
"""Iterations of a turn where one worker does everything."""

PRICES_UNTIL = 0.6
"""Part of the time after which prices leave their lane to others, and so does a search for anything feasible."""

BLOCKS_UNTIL = 0.9
"""Part of the time after which patterns do."""

MEMORY_SHARE = 0.8
"""Not tunable: part of the free memory that all members may take together; the rest is for what else runs."""

# portfolio.py

CLEANUP_SHARE = 0.02
"""Part of the time that is left for the last claims."""

MOST_CLEANUP_SECONDS = 1.0
"""Not tunable: the same in seconds, at most; more no claim takes."""

WORTH_WARMING_SECONDS = 0.05
"""Not tunable: seconds of presolve after which a worker is started beside it; in less nothing starts."""

LAST_WORDS_SECONDS = 0.02
"""Not tunable: seconds in which a member that has just closed the gap may return."""

CHECK_EFFORT = 10
"""Checking incumbents takes at most about one part in this many of the time."""
