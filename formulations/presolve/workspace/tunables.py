"""Tunables of presolve: effort up to which each reduction is tried."""

from __future__ import annotations

# sequence.py

PRESOLVE_SHARE = 0.5
"""Part of the time that presolve may take before a solve."""

DEEP_ENTRIES = 10_000_000
"""Entries of all tables from which on a problem may be deep."""

DEEP_SHARING = 4
"""Factors that use the same array, on average, from which on a large problem is deep."""

# dominated_strategies.py

DOMINANCE_OF_A_NODE = 1 << 21
"""Comparisons of table entries for one node, at most."""

# free_nodes.py

FREE_NEIGHBOURS = 2
"""Not tunable: neighbours of a node that is eliminated, since tables of three are hardly ever smaller."""

FREE_COMBINATIONS = 1 << 22
"""Entries of the table that an elimination looks at, at most."""
