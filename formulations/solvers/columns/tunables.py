"""Tunables of column generation: one table per member."""

from __future__ import annotations

# generation.py

BOUND_SHARE = 0.65
"""Part of the time after which the sweeps of the whole problem end; prices of the tied problem have half of it."""

MOST_PAIRS = 100_000
"""Not tunable: where nothing is limited, the time ends the sweeps."""

FACTOR_NOISE = 0.15
"""Standard deviation of the logarithm of later factors; more after idle rounds."""

PATTERNS_A_ROUND = 3
"""Patterns of each later round, at least."""

VISITED_NODES = 2_000
"""Nodes of the patterns of such a round together, if that is more; and those that are rebuilt without a gain, the same
one more than once, before the rebuilding of a pattern ends."""

MIXED_PATTERNS = 24
"""Newest patterns that the master mixes."""

DEARER = 1.3
"""Factor by which prices rise from round to round while nothing fits."""

MASTER_SECONDS = 10.0
"""Seconds of one master, at most, where no iteration limit asks for the same result on every machine."""

# repeated_blocks.py

REPEATED_WINDOW = 4
"""Equal nodes in a row by which a repetition is noticed."""

LEAST_REPETITIONS = 2
"""Not tunable: what is there once repeats nothing."""

TRIED_PERIODS = 32
"""Distances between repetitions that are tried."""

# restricted_master.py

MOST_COLUMNS = 60_000
"""Columns of the linear model up to which the master is solved."""

# tied_prices.py

FRESH_ROWS = 4
"""Rows that get a price in one step: the others mostly follow."""
