"""Tunables of presolve: effort up to which each reduction is tried."""

from __future__ import annotations

# sequence.py

MOST_ROUNDS = 50
"""Rounds of all reductions."""

DEEP_ENTRIES = 10_000_000
"""Entries of all tables from which on a problem may be deep."""

DEEP_SHARING = 4
"""Factors that use the same array, on average, from which on a large problem is deep."""

# component_fronts.py

COMPONENT_NODES = 32
"""Nodes of a component that a front replaces, at most."""

COMPONENT_INTERVALS = 64
"""Intervals of time in which a component uses memory, at most."""

COMPONENT_STRATEGIES = 128
"""Strategies of the node that replaces a component, at most."""

# isolated_nodes.py

ISOLATED_INTERVALS = 64
"""Usage terms of an isolated node that is merged, at most."""

ISOLATED_STRATEGIES = 128
"""Strategies of the node that replaces isolated ones, at most."""

# component_states.py

FRONT_STATES = 1 << 15
"""States of a front that are compared at once, where usage has one interval."""

FRONT_COMPARISONS = 1 << 26
"""Comparisons of amounts at once, where usage has several intervals."""

# dominated_strategies.py

DOMINANCE_OF_A_NODE = 1 << 21
"""Comparisons of table entries for one node, at most."""

DOMINANCE_OF_A_ROUND = 1 << 31
"""Comparisons of table entries in one round, at most."""

# free_components.py

FREE_ENTRIES = 1 << 26
"""Entries of all tables of an elimination, at most: seconds of presolve."""

# free_nodes.py

FREE_NEIGHBOURS = 2
"""Neighbours of a node that is eliminated, at most."""

FREE_COMBINATIONS = 1 << 22
"""Entries of the table that an elimination looks at, at most."""

# component_parts.py

WORTHWHILE_SHARE = 0.02
"""Part of the nodes that must be candidates, or a round of fronts is not worth it."""
