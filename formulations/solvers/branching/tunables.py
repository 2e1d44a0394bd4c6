"""Tunables of price and branch, and of probing: one table per member."""

from __future__ import annotations

# price_and_branch.py

MOST_CORE_COLUMNS = 400_000
"""Columns of the linear model of the core up to which branch and cut is tried."""

FEW_HUBS = 40
"""Hubs up to which deciding them soon leaves little of the gap that they cause."""

CORE_FIRST_SHARE = 0.3
"""Part of the time after which the core is looked at first."""

CORE_SECOND_SHARE = 0.6
"""The same for the second look: a better incumbent makes the core smaller."""

CORE_WIDE_SHARES = (0.45, 0.6, 1.0)
"""The same for later looks where tables are very large."""

NARROWED = 0.1
"""Part of the gap that prices must close between looks, or hubs are branched on."""

BRANCHED_ENTRIES = 30_000_000
"""Table entries up to which they are: three branches hold six copies, 1.5 GB."""

CORE_ENTRIES = 20 * MOST_CORE_COLUMNS
"""Table entries after fixing up to which presolve may make a core of them."""

# price_probing.py

PROBING_FIRST_PAIRS = 5
"""Pairs of sweeps before the first price step."""

PROBING_FIRST_STEPS = 40
"""Price steps on the whole problem, at most."""

PROBING_FIRST_SHARE = 0.5
"""Part of the time for these steps, at most."""

PROBED_NODES = 8
"""Nodes of each round that are split in two."""

PROBING_STEPS = 10
"""Price steps of a trial, at most."""
