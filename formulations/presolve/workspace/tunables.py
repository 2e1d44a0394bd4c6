"""Tunables of presolve: effort up to which each reduction is tried."""

from __future__ import annotations

# sequence.py

MOST_ROUNDS = 50
"""Rounds of all reductions."""

DEEP_ENTRIES = 10_000_000
"""Entries of all tables from which on a problem may be deep."""

DEEP_SHARING = 4
"""Factors that use the same array, on average, from which on a large problem is deep."""

# dominated_strategies.py

DOMINANCE_OF_A_NODE = 1 << 21
"""Comparisons of table entries for one node, at most."""

DOMINANCE_OF_A_ROUND = 1 << 31
"""Comparisons of table entries in one round, at most."""

# free_nodes.py

FREE_NEIGHBOURS = 2
"""Neighbours of a node that is eliminated, at most."""

FREE_COMBINATIONS = 1 << 22
"""Entries of the table that an elimination looks at, at most."""
